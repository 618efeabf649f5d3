"""What FusedLAMB and FusedMixedPrecisionLamb have in common."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..stepping.numbers import Scaling, StepNumbers, rounding_key
from ..stepping.optimizer import FusedOptimizer, amp_c_function
from .buckets import LambBucket, share_grad_norm
from .ops import lamb_step


class LambOptimizer(FusedOptimizer):
    """Checks of hyper-parameters, and what both classes hand to ``lamb_step``."""

    kept_attributes = ("adam_w_mode", "stochastic_rounding", "use_nvlamb")
    bucket_class = LambBucket
    kernels = "fused_lamb"

    adam_w_mode: int  # 1: the decay is part of the update; 0: of the gradient
    use_nvlamb: bool
    multi_tensor_l2norm = amp_c_function("multi_tensor_l2norm")

    def __init__(self, params: Any, defaults: dict[str, Any], amsgrad: bool) -> None:
        if amsgrad:
            raise RuntimeError(
                f"{self.layout.optimizer}: amsgrad=True is not supported; LAMB has no such variant."
            )
        super().__init__(params, defaults)

    def step_buckets(self, buckets: list[LambBucket]) -> None:
        share_grad_norm(buckets, Scaling.of(self).inv_scale)
        super().step_buckets(buckets)

    def step_bucket(self, bucket: LambBucket, numbers: StepNumbers) -> None:
        group = bucket.group
        bucket.run(
            _lamb_step if self.layout.has_masters else _plain_step,
            numbers.lr,
            numbers.device_lr,
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            numbers.step,
            numbers.device_step,
            bool(group["bias_correction"]),
            bool(group["grad_averaging"]),
            bool(self.adam_w_mode),
            bool(self.use_nvlamb),
            bool(group["maximize"]),
            bucket.grad_norm,
            group["max_grad_norm"],
            None,
            numbers.inv_scale,
            numbers.found_inf,
            rounding_key(self, bucket) if self.stochastic_rounding else None,
        )


def _plain_step(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list, exp_avg_sqs: list, *hyper: Any
) -> None:
    lamb_step(params, grads, exp_avgs, exp_avg_sqs, [], *hyper)


def _lamb_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    *hyper: Any,
) -> None:
    updated, copies = (masters, params) if masters else (params, [])
    lamb_step(updated, grads, exp_avgs, exp_avg_sqs, copies, *hyper)
