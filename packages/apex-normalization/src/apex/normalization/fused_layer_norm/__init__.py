"""Layer and RMS normalization, forward and backward, fused."""

from . import ops as ops
from .apex_names import (
    FusedLayerNormAffineFunction,
    FusedLayerNormAffineMixedDtypesFunction,
    FusedLayerNormFunction,
    FusedRMSNormAffineFunction,
    FusedRMSNormAffineMixedDtypesFunction,
    FusedRMSNormFunction,
)
from .custom_ops import (
    fakes,
    fused_layer_norm_affine_bwd,
    fused_layer_norm_affine_fwd,
    fused_layer_norm_affine_mixed_dtypes_fwd,
    fused_layer_norm_bwd,
    fused_layer_norm_fwd,
    fused_rms_norm_affine_bwd,
    fused_rms_norm_affine_fwd,
    fused_rms_norm_affine_mixed_dtypes_fwd,
    fused_rms_norm_bwd,
    fused_rms_norm_fwd,
)
from .formulas import decompositions
from .functional import (
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    manual_rms_norm,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
    supports_custom_op,
)
from .modules import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm

globals().update(fakes)

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "decompositions",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_layer_norm_affine_bwd",
    "fused_layer_norm_affine_fwd",
    "fused_layer_norm_affine_mixed_dtypes_fwd",
    "fused_layer_norm_bwd",
    "fused_layer_norm_fwd",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "fused_rms_norm_affine_bwd",
    "fused_rms_norm_affine_fwd",
    "fused_rms_norm_affine_mixed_dtypes_fwd",
    "fused_rms_norm_bwd",
    "fused_rms_norm_fwd",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
    "supports_custom_op",
]
