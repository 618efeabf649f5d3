"""Apex's extension module of index_mul_2d: its positional signatures over this wheel's ops.

The first arguments are tensors that results are written to. Importable only where the kernels can
run, because callers take the import as that answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex.contrib._ops import library
from apex.contrib.index_mul_2d import ops as _ops
from apex.contrib.index_mul_2d.index_mul_2d import check_operands as _check_operands

library.require_for_import(__name__, "index_mul_2d")

__all__ = [
    "float_backward",
    "float_backward_backward",
    "float_forward",
    "half_backward",
    "half_backward_backward",
    "half_forward",
]


@torch.no_grad()
def float_forward(out: Tensor, in1: Tensor, in2: Tensor, idx1: Tensor) -> None:
    """Write ``in1[idx1] * in2`` to ``out``, ``[N, H]``.

    Shapes, dtypes and errors are those of :func:`apex.contrib.index_mul_2d.index_mul_2d`, of which
    both names of this module take all dtypes. What is written to has the shape, dtype and device of
    what it belongs to, and any layout, else ValueError, and nothing is written.
    """
    operands = _operands(in1, in2, idx1)
    _check_outputs(in2, out=out)
    out.copy_(_ops.index_mul_2d_forward(*operands))


@torch.no_grad()
def float_backward(
    grad_in1: Tensor, grad_in2: Tensor, grad_out: Tensor, in1: Tensor, in2: Tensor, idx1: Tensor
) -> None:
    """Write the gradients of ``in1`` and ``in2`` to ``grad_in1``, ``[M, H]``, and ``grad_in2``.

    What ``grad_in1`` held is replaced: it need not be zeros.
    """
    operands = _operands(in1, in2, idx1)
    _check_outputs(in1, grad_in1=grad_in1)
    _check_outputs(in2, grad_in2=grad_in2, grad_out=grad_out)
    of_in1, of_in2 = _ops.index_mul_2d_backward(grad_out, *operands, True)
    grad_in1.copy_(of_in1)
    grad_in2.copy_(of_in2)


@torch.no_grad()
def float_backward_backward(
    grad_grad_out: Tensor,
    grad_in1: Tensor,
    grad_in2: Tensor,
    grad_out: Tensor,
    grad_grad_in1: Tensor,
    grad_grad_in2: Tensor,
    in1: Tensor,
    in2: Tensor,
    idx1: Tensor,
) -> None:
    """Write the gradients of :func:`float_backward`'s inputs ``grad_out``, ``in1`` and ``in2``.

    Given those of its two results, ``grad_grad_in1`` and ``grad_grad_in2``:
    ``grad_grad_out = grad_grad_in1[idx1] * in2 + in1[idx1] * grad_grad_in2``; ``grad_in1`` is the
    sum of ``grad_out * grad_grad_in2`` over the rows of each index, and
    ``grad_in2 = grad_grad_in1[idx1] * grad_out``.
    """
    in1, in2, idx1 = _operands(in1, in2, idx1)
    _check_outputs(in1, grad_in1=grad_in1, grad_grad_in1=grad_grad_in1)
    rows = {"grad_grad_out": grad_grad_out, "grad_in2": grad_in2, "grad_out": grad_out}
    _check_outputs(in2, **rows, grad_grad_in2=grad_grad_in2)
    of_in1, of_in2 = grad_grad_in1.contiguous(), grad_grad_in2.contiguous()
    total = _ops.index_mul_2d_forward(of_in1, in2, idx1)
    total += _ops.index_mul_2d_forward(in1, of_in2, idx1)
    results = _ops.index_mul_2d_backward(grad_out, of_in1, of_in2, idx1, True)
    for target, result in zip((grad_grad_out, grad_in1, grad_in2), (total, *results), strict=True):
        target.copy_(result)


half_forward = float_forward
"""``float_forward``, which takes every dtype."""
half_backward = float_backward
"""``float_backward``, which takes every dtype."""
half_backward_backward = float_backward_backward
"""``float_backward_backward``, which takes every dtype."""


def _operands(in1: Tensor, in2: Tensor, idx1: Tensor) -> tuple[Tensor, ...]:
    _check_operands(in1, in2, idx1)
    return in1.contiguous(), in2.contiguous(), idx1.contiguous()


def _check_outputs(like: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        expected = like.shape, like.dtype, like.device
        if (tensor.shape, tensor.dtype, tensor.device) != expected:
            raise ValueError(
                f"fused_index_mul_2d: {name} must be {like.dtype} {list(like.shape)} on "
                f"{like.device}, got {tensor.dtype} {list(tensor.shape)} on {tensor.device}."
            )
