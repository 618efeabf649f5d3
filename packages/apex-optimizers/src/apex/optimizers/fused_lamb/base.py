"""What FusedLAMB and FusedMixedPrecisionLamb have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._base import FusedOptimizer
from .._checks import check_betas, check_lr, check_not_negative
from .buckets import LambBucket


class LambOptimizer(FusedOptimizer):
    """Checks of hyper-parameters, and what both classes hand to ``lamb_step``."""

    kept_attributes = ("adam_w_mode", "use_nvlamb")
    bucket_class = LambBucket

    adam_w_mode: int  # 1: the decay is part of the update; 0: of the gradient
    use_nvlamb: bool

    def __init__(self, params: Any, defaults: dict[str, Any], amsgrad: bool) -> None:
        if amsgrad:
            raise RuntimeError(
                f"{self.layout.optimizer}: amsgrad=True is not supported; LAMB has no such variant."
            )
        super().__init__(params, defaults)

    def check_group(self, group: dict[str, Any]) -> None:
        name = self.layout.optimizer
        check_lr(name, group["lr"])
        check_betas(name, group["betas"])
        check_not_negative(name, group, ("eps", "weight_decay", "max_grad_norm"))

    @property
    def multi_tensor_l2norm(self) -> Callable[..., Any]:
        """``amp_C.multi_tensor_l2norm``, which subclasses written for Apex call."""
        import amp_C

        return amp_C.multi_tensor_l2norm
