"""Fused layer and RMS normalization for PyTorch."""

from .fused_add_norm import fused_add_layer_norm, fused_add_rms_norm
from .fused_layer_norm import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from .swapping import Swaps, from_torch

__all__ = [
    "FusedLayerNorm",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "Swaps",
    "from_torch",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
]
