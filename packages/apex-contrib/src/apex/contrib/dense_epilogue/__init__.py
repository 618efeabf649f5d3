"""What follows a matrix product in a dense layer, and the way back: `apex.mlp` and
`apex.fused_dense` take these operators, and matrix products from torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._ops import library
from .._shared.native.batching import register_vmap

__all__ = [
    "GELU",
    "RELU",
    "SIGMOID",
    "decompositions",
    "dense_activation_backward",
    "dense_gelu",
]

RELU, SIGMOID, GELU = 1, 2, 3  # the first two numbers are Apex's


@library.define("dense_gelu(Tensor x) -> Tensor")
def dense_gelu(x: Tensor) -> Tensor:
    """``F.gelu(x, approximate="tanh")`` of contiguous ``[..., columns]``; no gradient."""
    return torch.empty_like(x)


@library.define(
    "dense_activation_backward(Tensor dy, Tensor saved, int activation, bool bias_grad)"
    " -> (Tensor dx, Tensor dbias)"
)
def dense_activation_backward(
    dy: Tensor, saved: Tensor, activation: int, bias_grad: bool
) -> tuple[Tensor, Tensor]:
    """Gradient of an activation's input, and its sum over rows.

    ``saved`` is the output of ``RELU`` and ``SIGMOID``, and the input of ``GELU``: contiguous,
    ``[..., columns]``. ``dx`` is like it; ``dbias``, ``[columns]``, is added in float32 at least,
    or ``[0]`` without ``bias_grad``. ``dy`` has any layout.
    """
    return torch.empty_like(saved), saved.new_empty([saved.shape[-1] if bias_grad else 0])


register_vmap(dense_gelu, {0: 1})
register_vmap(dense_activation_backward, {})  # each sample has a sum of its own


def _plain_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _plain_backward(
    dy: Tensor, saved: Tensor, activation: int, bias_grad: bool
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(saved.dtype, torch.float32)
    wide, kept = dy.to(dtype), saved.to(dtype)
    if activation == GELU:
        dx = torch.ops.aten.gelu_backward(wide, kept, approximate="tanh")
    else:
        dx = torch.where(kept <= 0, 0, wide) if activation == RELU else wide * kept * (1 - kept)
    dx = dx.to(saved.dtype)
    if not bias_grad:
        return dx, dx.new_empty([0])
    rows = list(range(dx.dim() - 1))
    return dx, dx.to(dtype).sum(rows).to(dx.dtype) if rows else dx.clone()


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Both operators in ATen's, for ``ExportedProgram.run_decompositions``."""
    return {dense_gelu: _plain_gelu, dense_activation_backward: _plain_backward}
