"""Layer and RMS normalization, forward and backward, fused."""

from . import ops
from .batching import batch_one_by_one, batch_rows
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
from .decompositions import decompositions
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
from .functions import (
    FusedLayerNormAffineFunction,
    FusedLayerNormAffineMixedDtypesFunction,
    FusedLayerNormFunction,
    FusedRMSNormAffineFunction,
    FusedRMSNormAffineMixedDtypesFunction,
    FusedRMSNormFunction,
)
from .modules import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm

globals().update(fakes)

# What holds of the operators beside their kernels.
for _op in (ops.layer_norm_forward, ops.rms_norm_forward):
    batch_rows(_op, with_rows=1)
for _op in (ops.layer_norm_backward, ops.rms_norm_backward):
    batch_one_by_one(_op)

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
