"""my_op: says in one sentence what it computes; here, each row minus its mean."""

import torch
from torch import Tensor

from .._ops import library
from .._shared.native.transforms import differentiated_again, needs_plain

__all__ = ["my_op"]

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@library.define("my_op(Tensor x) -> Tensor")
def my_op_kernel(x: Tensor) -> Tensor:
    """``y = x - mean(x)`` over the last dimension of contiguous ``x``; ``y`` is like ``x``."""
    return torch.empty_like(x)


def _plain(x: Tensor) -> Tensor:
    """The formula without fusion: for derivatives beyond the first, ``torch.func`` and the like."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide - wide.mean(-1, keepdim=True)).to(x.dtype)


class _MyOp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return my_op_kernel(x.contiguous())

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if differentiated_again():
            return torch.func.vjp(_plain, x)[1](grad)[0]
        # Subtracting the mean is its own adjoint; call the kernel of your own gradient here.
        return my_op_kernel(grad.contiguous())


def my_op(x: Tensor) -> Tensor:
    r"""Subtract from each row its mean.

    .. math:: y = x - \frac{1}{n} \sum_{i=1}^{n} x_i

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
    if x.dtype not in _DTYPES:
        raise TypeError(f"my_op: x must be floating point, got {x.dtype}.")
    if x.dim() == 0:
        raise ValueError("my_op: x must have at least one dimension, got a 0-d tensor.")
    return _plain(x) if needs_plain() else _MyOp.apply(x)
