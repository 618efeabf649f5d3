"""Residual connection and normalization in one pass over memory, forward and backward."""

from ..fused_layer_norm.batching import batch_one_by_one, batch_rows
from . import decompositions as _decompositions  # noqa: F401  (enters the table)
from . import ops
from .functional import fused_add_layer_norm, fused_add_rms_norm
from .functions import FusedAddLayerNormFunction, FusedAddRMSNormFunction

for _op in (ops.add_layer_norm_forward, ops.add_rms_norm_forward):
    batch_rows(_op, with_rows=2)
for _op in (ops.add_layer_norm_backward, ops.add_rms_norm_backward):
    batch_one_by_one(_op)

__all__ = [
    "FusedAddLayerNormFunction",
    "FusedAddRMSNormFunction",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
]
