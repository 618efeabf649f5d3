"""The index_mul_2d operators: schemas, documentation and fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import library


@library.define("index_mul_2d_forward(Tensor in1, Tensor in2, Tensor idx1) -> Tensor")
def index_mul_2d_forward(in1: Tensor, in2: Tensor, idx1: Tensor) -> Tensor:
    """``in1[idx1] * in2``, contiguous: ``[M, H]``, ``[N, H]`` and int64 ``[N]`` to ``[N, H]``.

    RuntimeError for a number in ``idx1`` outside of ``[-M, M)`` on a CPU; on a GPU, where raising
    would wait for the device, its row becomes NaN, and nothing is read out of bounds.
    """
    return torch.empty_like(in2)


@library.define(
    "index_mul_2d_backward(Tensor dy, Tensor in1, Tensor in2, Tensor idx1, bool in1_grad)"
    " -> (Tensor din1, Tensor din2)"
)
def index_mul_2d_backward(
    dy: Tensor, in1: Tensor, in2: Tensor, idx1: Tensor, in1_grad: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`index_mul_2d_forward`; ``dy`` has any layout.

    ``din1``, ``[M, H]``, is added up in float32 at least, in the order of the rows, whatever the
    number of threads; it is ``[0]`` without ``in1_grad``. ``din2`` is ``[N, H]``. On a GPU a number
    in ``idx1`` that is out of range adds nothing to ``din1``, and makes its row of ``din2`` NaN.
    """
    return torch.empty_like(in1) if in1_grad else in1.new_empty([0]), torch.empty_like(in2)
