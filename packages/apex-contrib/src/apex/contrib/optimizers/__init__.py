"""Optimizers of Apex's contrib; those not named here are imported from their own modules."""

from .fp16_optimizer import FP16_Optimizer
from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB"]
