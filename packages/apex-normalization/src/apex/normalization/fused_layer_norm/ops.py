"""The layer and RMS normalization operators: schemas, documentation and fake kernels.

They work on raw memory: contiguous tensors, taken as matrices ``[rows, columns]``. "Statistics" are
float32, or float64 for float64 input. Kernels exist for weights in the input's dtype and for
float32 weights with 16-bit input; ``formulas.py`` casts other combinations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import library
from .._shared.native.fakes import expect
from .._shared.native.operands import statistics_dtype


@library.define(
    "layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, int columns, float eps, "
    "bool zero_centered_gamma=False) -> (Tensor y, Tensor mean, Tensor rstd)"
)
def layer_norm_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    columns: int,
    eps: float,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``y = (x - mean) * rstd * weight + bias`` over runs of ``columns`` elements.

    Args:
        x: any shape with a multiple of ``columns`` elements.
        weight, bias: ``columns`` elements of one dtype; None is 1 and 0. A bias needs a weight.
        columns: elements that are normalized together.
        eps: added to the biased variance, in units of ``x ** 2``.
        zero_centered_gamma: ``1 + weight`` stands in the place of ``weight``, summed in the
            statistics' dtype.

    Returns:
        y: shape of ``x``, dtype of ``weight`` (of ``x`` without one).
        mean, rstd: statistics, ``[rows]``.
    """
    y = torch.empty_like(x, dtype=_output_dtype(x, weight), memory_format=torch.contiguous_format)
    return y, statistics(x, columns), statistics(x, columns)


@library.define(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, "
    "int columns, bool weight_grads, bool zero_centered_gamma=False)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)"
)
def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    columns: int,
    weight_grads: bool,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`layer_norm_forward`.

    Args:
        dy: gradient of ``y``, in its shape and dtype; any layout.
        x, weight, columns, zero_centered_gamma: as given to the forward.
        mean, rstd: as returned by the forward.
        weight_grads: compute ``dweight`` and ``dbias`` too; needs a weight.

    Returns:
        dx: like ``x``.
        dweight, dbias: ``[columns]`` in ``dy``'s dtype, summed in the statistics' dtype, the same
        bits for the same number of threads; ``[0]`` without ``weight_grads``.
    """
    return (
        _like("x", x, columns),
        column_sums(dy, columns, weight_grads),
        column_sums(dy, columns, weight_grads),
    )


@library.define(
    "layer_norm_backward_from_output(Tensor dy, Tensor y, Tensor? weight, Tensor? bias, "
    "Tensor rstd, int columns, float eps, bool weight_grads, bool zero_centered_gamma=False)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)"
)
def layer_norm_backward_from_output(
    dy: Tensor,
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor,
    columns: int,
    eps: float,
    weight_grads: bool,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`layer_norm_forward`, from ``xhat = (y - bias) / weight``.

    The division is by ``sign(weight) * max(abs(weight), eps)``, of ``1 + weight`` with
    ``zero_centered_gamma``. Arguments and results are those of :func:`layer_norm_backward`; all but
    ``rstd`` have one dtype, ``dx``'s too.
    """
    return (
        _like("y", y, columns),
        column_sums(dy, columns, weight_grads),
        column_sums(dy, columns, weight_grads),
    )


@library.define(
    "rms_norm_forward(Tensor x, Tensor? weight, int columns, float eps, "
    "bool zero_centered_gamma=False) -> (Tensor y, Tensor rstd)"
)
def rms_norm_forward(
    x: Tensor, weight: Tensor | None, columns: int, eps: float, zero_centered_gamma: bool = False
) -> tuple[Tensor, Tensor]:
    """``y = x * rstd * weight`` with ``rstd = 1 / sqrt(mean(x ** 2) + eps)``.

    Arguments and results are those of :func:`layer_norm_forward`, without bias and mean.
    """
    y = torch.empty_like(x, dtype=_output_dtype(x, weight), memory_format=torch.contiguous_format)
    return y, statistics(x, columns)


@library.define(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, int columns, "
    "bool weight_grads, bool zero_centered_gamma=False) -> (Tensor dx, Tensor dweight)"
)
def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    columns: int,
    weight_grads: bool,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`rms_norm_forward`; see :func:`layer_norm_backward`."""
    return _like("x", x, columns), column_sums(dy, columns, weight_grads)


@library.define(
    "rms_norm_backward_from_output(Tensor dy, Tensor y, Tensor? weight, Tensor rstd, int columns, "
    "float eps, bool weight_grads, bool zero_centered_gamma=False) -> (Tensor dx, Tensor dweight)"
)
def rms_norm_backward_from_output(
    dy: Tensor,
    y: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    columns: int,
    eps: float,
    weight_grads: bool,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`rms_norm_forward`; see :func:`layer_norm_backward_from_output`."""
    return _like("y", y, columns), column_sums(dy, columns, weight_grads)


def _like(argument: str, x: Tensor, columns: int) -> Tensor:
    check_columns(argument, x, columns)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _output_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    return x.dtype if weight is None else weight.dtype


def statistics(x: Tensor, columns: int) -> Tensor:
    check_columns("x", x, columns)
    return x.new_empty([x.numel() // columns], dtype=statistics_dtype(x.dtype))


def column_sums(dy: Tensor, columns: int, wanted: bool) -> Tensor:
    return dy.new_empty([columns if wanted else 0])


def check_columns(argument: str, tensor: Tensor, columns: int) -> None:
    """Expect of a fake kernel's tensor that it is a matrix of so many columns."""
    expect(columns > 0, f"columns must be positive, got {columns}.")
    expect(
        tensor.numel() % columns == 0,
        f"{argument} has {tensor.numel()} elements, which is no multiple of columns = {columns}.",
    )
