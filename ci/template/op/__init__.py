"""my_op: says in one sentence what it computes; here, each row times its mean."""

import torch
from torch import Tensor

from .._ops import library
from .._shared.native.formula import Formula
from .._shared.native.operands import check_floating, exact

__all__ = ["decompositions", "my_op"]


@library.define("my_op_forward(Tensor x) -> Tensor")
def my_op_forward(x: Tensor) -> Tensor:
    """``y = x * mean(x)`` over the last dimension of contiguous ``x``; ``y`` is like ``x``."""
    return torch.empty_like(x)


@library.define("my_op_backward(Tensor dy, Tensor x) -> Tensor")
def my_op_backward(dy: Tensor, x: Tensor) -> Tensor:
    """``dx = dy * mean(x) + mean(dy * x)``; ``dx`` is like ``x``."""
    return torch.empty_like(x)


def _reference(x: Tensor) -> Tensor:
    """The forward in plain PyTorch, from which every further derivative follows."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * wide.mean(-1, keepdim=True)).to(x.dtype)


_my_op = Formula(
    "my_op", my_op_forward, my_op_backward, _reference, saves=("x",), grads=("x",), rows={"x": 1}
)
decompositions = _my_op.decompositions


def my_op(x: Tensor) -> Tensor:
    r"""Multiply each row with its mean.

    .. math:: y = \frac{x}{n} \sum_{i=1}^{n} x_i

    Args:
        x: ``[..., columns]``; float64, float32, float16 or bfloat16; any layout.

    Returns:
        Shape, dtype and device of ``x``, contiguous. 16-bit rows are computed in float32 and
        rounded once.

    Raises:
        TypeError: ``x`` has another dtype.
        ValueError: ``x`` has no dimension.

    Source:
        The paper and the number of the equation.
    """
    check_floating("my_op", "x", x)
    if x.dim() == 0:
        raise ValueError("my_op: x must have at least one dimension, got a 0-d tensor.")
    return _my_op(exact(x))
