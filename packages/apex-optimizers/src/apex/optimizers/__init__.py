"""Optimizers that update all parameters of one device and dtype in a single launch."""

from .fused_adam import FusedAdam

__all__ = ["FusedAdam"]
