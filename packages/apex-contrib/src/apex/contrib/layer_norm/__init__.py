"""Layer normalization under Apex's contrib names: :class:`FastLayerNorm`."""

from .layer_norm import FastLayerNorm

__all__ = ["FastLayerNorm"]
