"""A dense layer's products with what follows them in one kernel, by cuBLASLt and hipBLASLt.

The functions return None where the library does not serve: on a CPU, for dtypes of more than 16
bits, in compiled code, or for sizes that it has no algorithm for. The caller then composes the same
from torch's products and the operators of ``dense_epilogue``.
"""

from __future__ import annotations

from torch import Tensor

from .._ops import library
from .._shared.native.blaslt import log_refusal, may_serve
from .._shared.native.plain import direct

__all__ = ["dense_gelu_gradient", "dense_with_gelu", "weight_and_bias_gradients"]


@library.define(
    "dense_gelu_blaslt(Tensor x, Tensor weight, Tensor? bias)"
    " -> (Tensor y, Tensor gelu_in, int outcome)"
)
def dense_gelu_blaslt(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """GELU of ``x @ weight.T + bias`` ``[rows, out]``, and that; see ``apex/torch/blaslt.h``.

    All are contiguous, of one dtype: float32, float16 or bfloat16. Unless the outcome is 0, the
    results are uninitialized.
    """
    rows, columns = x.shape[0], weight.shape[0]
    return x.new_empty(rows, columns), x.new_empty(rows, columns), 0


@library.define(
    "dense_gelu_backward_blaslt(Tensor dy, Tensor weight, Tensor gelu_in, bool bias_grad)"
    " -> (Tensor dx, Tensor dbias, int outcome)"
)
def dense_gelu_backward_blaslt(
    dy: Tensor, weight: Tensor, gelu_in: Tensor, bias_grad: bool
) -> tuple[Tensor, Tensor, int]:
    """``dy @ weight`` times the slope of GELU at ``gelu_in``, and its sums over rows.

    The latter are ``[0]`` without ``bias_grad``.
    """
    rows, columns = dy.shape[0], weight.shape[1]
    return dy.new_empty(rows, columns), dy.new_empty(columns if bias_grad else 0), 0


@library.define(
    "dense_gradients_blaslt(Tensor dy, Tensor x) -> (Tensor dweight, Tensor dbias, int outcome)"
)
def dense_gradients_blaslt(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """``dy.T @ x`` and the sums of ``dy`` over rows."""
    return dy.new_empty(dy.shape[1], x.shape[1]), dy.new_empty(dy.shape[1]), 0


_gelu, _gelu_backward = direct(dense_gelu_blaslt), direct(dense_gelu_backward_blaslt)
_gradients = direct(dense_gradients_blaslt)


def dense_with_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None, plain: bool = False
) -> tuple[Tensor, ...] | None:
    """GELU of ``gelu_in = x @ weight.T + bias`` ``[..., out]``, and ``gelu_in``; or None.

    ``plain`` is whether the call is known to be, here and below.
    """
    if not may_serve(x, weight, bias, plain=plain) or weight.numel() == 0:
        return None
    is_matrix = x.dim() == 2
    y, gelu_in, outcome = _gelu(x if is_matrix else x.view(-1, x.shape[-1]), weight, bias)
    if outcome:
        log_refusal("dense layer with GELU", outcome)
        return None
    if is_matrix:
        return y, gelu_in
    shape = *x.shape[:-1], weight.shape[0]
    return y.view(shape), gelu_in.view(shape)


def dense_gelu_gradient(
    dy: Tensor, weight: Tensor, gelu_in: Tensor, bias_grad: bool, plain: bool = False
) -> tuple[Tensor, Tensor] | None:
    """``dy @ weight`` times GELU's slope, and its sums over rows if they are wanted; or None.

    Args:
        dy: ``[rows, out]``.
        weight: ``[out, hidden]``.
        gelu_in: ``[..., hidden]``.

    Returns:
        ``[rows, hidden]``, and ``[hidden]`` or ``[0]``.
    """
    if not may_serve(dy, weight, gelu_in, plain=plain) or weight.numel() == 0:
        return None
    rows = gelu_in if gelu_in.dim() == 2 else gelu_in.view(-1, weight.shape[1])
    dx, dbias, outcome = _gelu_backward(dy, weight, rows, bias_grad)
    if outcome:
        log_refusal("gradient of GELU", outcome)
        return None
    return dx, dbias


def weight_and_bias_gradients(
    dy: Tensor, x: Tensor, plain: bool = False
) -> tuple[Tensor, Tensor] | None:
    """``dy.T @ x`` and the sums of ``dy`` over rows, of two matrices; or None."""
    if not may_serve(dy, x, plain=plain) or x.numel() == 0:
        return None
    dweight, dbias, outcome = _gradients(dy, x)
    if outcome:
        log_refusal("gradients of weight and bias", outcome)
        return None
    return dweight, dbias
