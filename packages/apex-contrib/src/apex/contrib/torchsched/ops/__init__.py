"""Operators under the names that Apex registers."""

from .layer_norm import layer_norm, layer_norm_backward

__all__ = ["layer_norm", "layer_norm_backward"]
