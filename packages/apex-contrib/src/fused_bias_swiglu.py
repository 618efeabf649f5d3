"""Apex's extension module of SwiGLU: its positional signatures over this wheel's ops.

Importable only where the kernels can run, because callers take the import as that answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

import apex.contrib.fused_bias_swiglu as _swiglu
from apex.contrib._ops import library

library.require_for_import(__name__, "fused_bias_swiglu")

__all__ = ["backward", "forward"]


@torch.no_grad()
def forward(input: Tensor, bias: Tensor) -> Tensor:
    """``silu(a) * b`` of the halves of ``input + bias``: ``[..., 2H]``, ``[2H]`` to ``[..., H]``.

    dtypes and errors are those of :func:`apex.fused_bias_swiglu.fused_bias_swiglu`; autocast does
    nothing, and there is no gradient.
    """
    with torch.autocast(input.device.type, enabled=False):
        return _swiglu.fused_bias_swiglu(input, bias)


@torch.no_grad()
def backward(grad_output: Tensor, input: Tensor, bias: Tensor) -> Tensor:
    """Gradient ``[..., 2H]`` of the input; its sum over rows is that of the bias."""
    _swiglu.check_operands(input, bias)
    operands = (t.contiguous() for t in (input, bias))
    return _swiglu.fused_bias_swiglu_backward(grad_output, *operands, False)[0]
