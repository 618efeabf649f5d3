"""What FusedLAMB and FusedMixedPrecisionLamb have in common."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..stepping.numbers import Scaling, norm_of_gradients, rounding_key
from ..stepping.optimizer import FusedOptimizer, amp_c_function
from ..stepping.step import Step
from .buckets import LambBucket
from .ops import lamb_step

_OF_SHARDS = ("squares", "only_pass")  # what LambBucket adds


def _step_masters(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    *hyper: Any,
) -> None:
    updated, copies = (masters, params) if masters else (params, [])
    lamb_step(updated, grads, exp_avgs, exp_avg_sqs, copies, *hyper)


WITHOUT_MASTERS = Step(lamb_step, __file__, before="Tensor[] copies", without=_OF_SHARDS)
WITH_MASTERS = Step(lamb_step, __file__, launch=_step_masters, without=_OF_SHARDS)


class LambOptimizer(FusedOptimizer):
    """Checks of hyper-parameters, and what both classes hand to ``lamb_step``."""

    kept_attributes = ("adam_w_mode", "stochastic_rounding", "use_nvlamb")
    bucket_class = LambBucket
    op = WITHOUT_MASTERS

    adam_w_mode: int  # 1: the decay is part of the update; 0: of the gradient
    use_nvlamb: bool
    _grad_norm: Tensor | None = None  # [1], of all gradients in a step that clips any
    multi_tensor_l2norm = amp_c_function("multi_tensor_l2norm")

    def __init__(self, params: Any, defaults: dict[str, Any], amsgrad: bool) -> None:
        if amsgrad:
            raise RuntimeError(
                f"{self.layout.optimizer}: amsgrad=True is not supported; LAMB has no such variant."
            )
        super().__init__(params, defaults)

    def step_buckets(self, buckets: list[LambBucket]) -> None:
        norm, inv_scale = None, Scaling.of(self).inv_scale
        if any(bucket.group["max_grad_norm"] > 0 for bucket in buckets):
            norm = norm_of_gradients(buckets)
            if inv_scale is not None:
                norm = norm * inv_scale.to(norm.device, norm.dtype)
        self._grad_norm = norm
        super().step_buckets(buckets)

    def arguments(self, bucket: LambBucket) -> dict[str, Any]:
        numbers = super().arguments(bucket)
        numbers["decoupled"], numbers["use_nvlamb"] = self.adam_w_mode, self.use_nvlamb
        numbers["copies"] = []
        if self._grad_norm is not None:
            numbers["global_grad_norm"] = self._grad_norm.to(bucket.params[0].device)
        if self.stochastic_rounding:
            numbers["rounding_key"] = rounding_key(self, bucket)
        return numbers
