"""Fused layer and RMS normalization for PyTorch."""

from sys import argv as _argv

if _argv[:1] == ["-m"]:  # the doctor may be asked, which answers without torch too
    from ._shared.native.doctor_torch import answer_without_torch as _answer

    _answer(__name__)

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
