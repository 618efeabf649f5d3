"""Residual connection and normalization in one pass over memory, forward and backward."""

from .functional import fused_add_layer_norm, fused_add_rms_norm

__all__ = ["fused_add_layer_norm", "fused_add_rms_norm"]
