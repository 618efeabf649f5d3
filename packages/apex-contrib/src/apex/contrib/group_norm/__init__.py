"""Group normalization of channels-last tensors, under Apex's contrib names: :class:`GroupNorm`."""

from .group_norm import GroupNorm

__all__ = ["GroupNorm"]
