"""SwiGLU with the bias before it: :func:`apex.contrib.fused_bias_swiglu.fused_bias_swiglu`."""

from apex.contrib.fused_bias_swiglu import fused_bias_swiglu

__all__ = ["fused_bias_swiglu"]
