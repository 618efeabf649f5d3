"""The fused add-and-normalize operators: schemas, documentation and fake kernels.

They work on raw memory: contiguous tensors, taken as matrices ``[rows, columns]``. "Statistics" are
float32, or float64 for float64 ``x``. Kernels exist for one dtype of all tensors, and for a 16-bit
``x`` with float32 weights and a residual in either dtype; ``formulas.py`` casts other
combinations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import library
from ..fused_layer_norm.ops import check_columns, column_sums, statistics


@library.define(
    "add_layer_norm_forward(Tensor x, Tensor residual, Tensor weight, Tensor? bias, int columns, "
    "float eps, bool zero_centered_gamma=False)"
    " -> (Tensor y, Tensor sum, Tensor mean, Tensor rstd)"
)
def add_layer_norm_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    columns: int,
    eps: float,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``sum = x + residual; y = (sum - mean) * rstd * weight + bias`` over ``columns`` elements.

    Args:
        x, residual: one shape, with a multiple of ``columns`` elements.
        weight, bias: ``columns`` elements of one dtype; without ``bias`` it is 0.
        columns: elements that are normalized together.
        eps: added to the biased variance, in units of ``sum ** 2``.
        zero_centered_gamma: ``1 + weight`` stands in the place of ``weight``, summed in the
            statistics' dtype.

    Returns:
        y: shape and dtype of ``x``.
        sum: rounded to the residual's dtype; mean, rstd and y are those of the rounded sum.
        mean, rstd: statistics, ``[rows]``.
    """
    return *_like(x, residual), statistics(x, columns), statistics(x, columns)


@library.define(
    "add_layer_norm_backward(Tensor dy, Tensor? dsum, Tensor sum, Tensor weight, Tensor mean, "
    "Tensor rstd, int columns, bool weight_grads, bool zero_centered_gamma=False)"
    " -> (Tensor dresidual, Tensor dx, Tensor dweight, Tensor dbias)"
)
def add_layer_norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    sum: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    columns: int,
    weight_grads: bool,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`add_layer_norm_forward`.

    Args:
        dy: gradient of ``y``, in its shape and dtype.
        dsum: gradient of ``sum``, in its shape and dtype, or None for zero.
        sum, mean, rstd: as returned by the forward.
        weight, columns, zero_centered_gamma: as given to the forward.
        weight_grads: compute ``dweight`` and ``dbias``, too.

    Returns:
        dresidual: shape and dtype of ``sum``.
        dx: the same numbers rounded to ``dy``'s dtype; ``[0]`` where that is ``sum``'s: then
            ``dresidual`` is also the gradient of ``x``.
        dweight, dbias: ``[columns]`` in the weight's dtype, summed in the statistics' dtype, the
            same bits for the same number of threads; ``[0]`` without ``weight_grads``.
    """
    return (
        *_input_grads(dy, sum, columns),
        column_sums(weight, columns, weight_grads),
        column_sums(weight, columns, weight_grads),
    )


@library.define(
    "add_rms_norm_forward(Tensor x, Tensor residual, Tensor weight, int columns, float eps, "
    "bool zero_centered_gamma=False) -> (Tensor y, Tensor sum, Tensor rstd)"
)
def add_rms_norm_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    columns: int,
    eps: float,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``sum = x + residual; y = sum * rstd * weight`` with ``rstd = 1 / sqrt(mean(sum**2) + eps)``.

    Arguments and results are those of :func:`add_layer_norm_forward`, without bias and mean.
    """
    return *_like(x, residual), statistics(x, columns)


@library.define(
    "add_rms_norm_backward(Tensor dy, Tensor? dsum, Tensor sum, Tensor weight, Tensor rstd, "
    "int columns, bool weight_grads, bool zero_centered_gamma=False)"
    " -> (Tensor dresidual, Tensor dx, Tensor dweight)"
)
def add_rms_norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    sum: Tensor,
    weight: Tensor,
    rstd: Tensor,
    columns: int,
    weight_grads: bool,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`add_rms_norm_forward`; see :func:`add_layer_norm_backward`."""
    return *_input_grads(dy, sum, columns), column_sums(weight, columns, weight_grads)


def _like(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    contiguous = torch.contiguous_format
    return (
        torch.empty_like(x, memory_format=contiguous),
        torch.empty_like(x, dtype=residual.dtype, memory_format=contiguous),
    )


def _input_grads(dy: Tensor, sum: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    check_columns("dy", dy, columns)
    dresidual = torch.empty_like(dy, dtype=sum.dtype, memory_format=torch.contiguous_format)
    return dresidual, dy.new_empty([0 if dy.dtype == sum.dtype else dy.numel()])
