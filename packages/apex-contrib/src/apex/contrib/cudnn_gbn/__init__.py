"""Batch normalization of channels-last images over groups of ranks."""

from .batch_norm import GroupBatchNorm2d

__all__ = ["GroupBatchNorm2d"]
