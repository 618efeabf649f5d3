"""Optimizers that update all parameters of one device and dtype in a single launch."""

from .fused_adam import FusedAdam
from .fused_sgd import FusedSGD

__all__ = ["FusedAdam", "FusedSGD"]
