"""A dense layer's products with what follows them in one kernel, by cuBLASLt and hipBLASLt.

The functions return None where the library does not serve: on a CPU, for dtypes of more than 16
bits, in compiled code, or for sizes that it has no algorithm for. The caller then composes the same
from torch's products and the operators of ``dense_epilogue``.
"""

from __future__ import annotations

from torch import Tensor

from .._ops import library
from .._shared.native.blaslt import is_done, may_serve

__all__ = ["dense_gelu_gradient", "dense_with_gelu", "weight_and_bias_gradients"]


@library.define(
    "dense_gelu_blaslt(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) y, Tensor(b!) gelu_in)"
    " -> int outcome"
)
def dense_gelu_blaslt(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, gelu_in: Tensor
) -> int:
    """Write ``x @ weight.T + bias`` ``[rows, out]`` and its GELU; see ``apex/torch/blaslt.h``.

    All are contiguous, of one dtype: float32, float16 or bfloat16. Nothing is written unless the
    outcome is 0.
    """
    return 0


@library.define(
    "dense_gelu_backward_blaslt(Tensor dy, Tensor weight, Tensor gelu_in, Tensor(a!) dx, "
    "Tensor(b!)? dbias) -> int outcome"
)
def dense_gelu_backward_blaslt(
    dy: Tensor, weight: Tensor, gelu_in: Tensor, dx: Tensor, dbias: Tensor | None
) -> int:
    """Write ``dy @ weight`` times the slope of GELU at ``gelu_in``, and its sums over rows."""
    return 0


@library.define(
    "dense_gradients_blaslt(Tensor dy, Tensor x, Tensor(a!) dweight, Tensor(b!) dbias)"
    " -> int outcome"
)
def dense_gradients_blaslt(dy: Tensor, x: Tensor, dweight: Tensor, dbias: Tensor) -> int:
    """Write ``dy.T @ x`` and the sums of ``dy`` over rows."""
    return 0


def dense_with_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...] | None:
    """``gelu_in = x @ weight.T + bias``, ``[..., out]``, and its GELU before it; or None."""
    if not may_serve(x, weight, bias) or weight.numel() == 0:
        return None
    rows = x.view(-1, x.shape[-1])
    made = [x.new_empty(*x.shape[:-1], weight.shape[0]) for _ in range(2)]
    y, gelu_in = (m.view(-1, weight.shape[0]) for m in made)
    outcome = dense_gelu_blaslt(rows, weight, bias, y, gelu_in)
    return tuple(made) if is_done("dense layer with GELU", outcome) else None


def dense_gelu_gradient(
    dy: Tensor, weight: Tensor, gelu_in: Tensor, bias_grad: bool
) -> tuple[Tensor, Tensor | None] | None:
    """``dy @ weight`` times GELU's slope, and its sums over rows if they are wanted; or None.

    Args:
        dy: ``[rows, out]``.
        weight: ``[out, hidden]``.
        gelu_in: ``[..., hidden]``, as the result.
    """
    if not may_serve(dy, weight, gelu_in) or weight.numel() == 0:
        return None
    hidden = weight.shape[1]
    dx = gelu_in.new_empty(gelu_in.shape)
    dbias = gelu_in.new_empty(hidden) if bias_grad else None
    rows = (gelu_in.view(-1, hidden), dx.view(-1, hidden))
    outcome = dense_gelu_backward_blaslt(dy, weight, *rows, dbias)
    return (dx, dbias) if is_done("gradient of GELU", outcome) else None


def weight_and_bias_gradients(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """``dy.T @ x`` and the sums of ``dy`` over rows, of two matrices; or None."""
    if not may_serve(dy, x) or x.numel() == 0:
        return None
    dweight, dbias = dy.new_empty(dy.shape[1], x.shape[1]), dy.new_empty(dy.shape[1])
    outcome = dense_gradients_blaslt(dy, x, dweight, dbias)
    return (dweight, dbias) if is_done("gradients of weight and bias", outcome) else None
