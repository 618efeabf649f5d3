"""Layer and RMS normalization as Formulas, and what brings operands to dtypes of the kernels.

The formulas compute everything in the statistics' dtype and round once, as the kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._shared.native.formula import Formula
from .._shared.native.operands import as_rows, as_vector, exact, statistics_dtype
from . import ops

_HALVES = (torch.float16, torch.bfloat16)


def layer_norm_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    columns: int,
    eps: float,
    zero_centered_gamma: bool = False,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``layer_norm_forward`` does, in plain PyTorch; y in ``out_dtype``."""
    rows = _wide(_rows(x, columns), x, weight)
    mean = rows.mean(-1, keepdim=True)
    deviation = rows - mean
    rstd = torch.rsqrt(deviation.square().mean(-1, keepdim=True) + eps)
    y = _affine(deviation * rstd, weight, bias, zero_centered_gamma)
    y = y.to(out_dtype or _output_dtype(x, weight))
    return _like(y, x, columns), *_statistics(x, mean, rstd)


def rms_norm_reference(
    x: Tensor,
    weight: Tensor | None,
    columns: int,
    eps: float,
    zero_centered_gamma: bool = False,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """What ``rms_norm_forward`` does, in plain PyTorch; y in ``out_dtype``."""
    rows = _wide(_rows(x, columns), x, weight)
    rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    y = _affine(rows * rstd, weight, None, zero_centered_gamma)
    y = y.to(out_dtype or _output_dtype(x, weight))
    return _like(y, x, columns), *_statistics(x, rstd)


def gradients(
    dy: Tensor,
    xhat: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    zero_centered_gamma: bool,
    has_mean: bool,
) -> tuple[Tensor, ...]:
    """dx, and each row's terms of dweight and, of a layer norm, which has a mean, of dbias.

    They come from normalized rows; all are wide.
    """
    g = _affine(dy, weight, None, zero_centered_gamma)
    along = g - g.mean(1, keepdim=True) if has_mean else g
    dx = rstd * (along - xhat * (g * xhat).mean(1, keepdim=True))
    return dx, dy * xhat, *([dy] if has_mean else [])


def normalized(rows: Tensor, rstd: Tensor, has_mean: bool) -> tuple[Tensor, Tensor]:
    """xhat and rstd ``[rows, 1]``, as functions of the rows: both can be differentiated.

    rstd is the number that was saved, with the derivative of ``rsqrt(square + eps)``.
    """
    if has_mean:
        rows = rows - rows.mean(1, keepdim=True)
    square = rows.square().mean(1, keepdim=True)
    eps = rstd.reshape(-1, 1).to(rows.dtype).square().reciprocal() - square
    rstd = torch.rsqrt(square + eps.detach())
    return rows * rstd, rstd


def sums(terms: Tensor, dtype: torch.dtype, wanted: bool) -> Tensor:
    """The gradient of a weight, as the kernels return it."""
    return terms.sum(0).to(dtype) if wanted else terms.new_empty([0], dtype=dtype)


def _layer_norm_backward(dy, x, weight, mean, rstd, *options):
    return _norm_backward(dy, x, weight, rstd, *options, has_mean=True)


def _norm_backward(
    dy, x, weight, rstd, columns, weight_grads, zero_centered_gamma=False, *, has_mean=False
):
    grad, rows = (wide_rows(t, x, dy, columns=columns) for t in (dy, x))
    at = normalized(rows, rstd, has_mean)
    dx, *terms = gradients(grad, *at, weight, zero_centered_gamma, has_mean)
    return dx.to(x.dtype).reshape(x.shape), *(sums(t, dy.dtype, weight_grads) for t in terms)


def _layer_norm_backward_from_output(dy, y, weight, bias, rstd, *options):
    return _norm_backward_from_output(dy, y, weight, rstd, *options, bias=bias, has_mean=True)


def _norm_backward_from_output(
    dy,
    y,
    weight,
    rstd,
    columns,
    eps,
    weight_grads,
    zero_centered_gamma=False,
    *,
    bias=None,
    has_mean=False,
):
    grad, rows = (wide_rows(t, y, columns=columns) for t in (dy, y))
    rows = rows if bias is None else rows - bias.to(rows.dtype)
    at = _undo(rows, weight, eps, zero_centered_gamma), rstd[:, None]
    dx, *terms = gradients(grad, *at, weight, zero_centered_gamma, has_mean)
    return dx.to(y.dtype).reshape(y.shape), *(sums(t, dy.dtype, weight_grads) for t in terms)


def _rows(x: Tensor, columns: int) -> Tensor:
    """``x`` whose last dimension has ``columns``: of any rank, so that a trace serves all ranks."""
    return x if x.shape[-1] == columns else x.reshape(-1, columns)


def _like(y: Tensor, x: Tensor, columns: int) -> Tensor:
    return y if x.shape[-1] == columns else y.reshape(x.shape)


def wide_rows(tensor: Tensor, *operands: Tensor | None, columns: int) -> Tensor:
    """``tensor`` as ``[rows, columns]``, in what the widest operand is computed in."""
    return _wide(tensor.reshape(-1, columns), *operands)


def _wide(tensor: Tensor, *operands: Tensor | None) -> Tensor:
    is_double = any(t is not None and t.dtype == torch.float64 for t in operands)
    return tensor.to(torch.float64 if is_double else torch.float32)


def _affine(
    xhat: Tensor, weight: Tensor | None, bias: Tensor | None, zero_centered_gamma: bool
) -> Tensor:
    y = xhat if weight is None else xhat * _scale(weight, xhat.dtype, zero_centered_gamma)
    return y if bias is None else y + bias.to(xhat.dtype)


def _scale(weight: Tensor, dtype: torch.dtype, zero_centered_gamma: bool) -> Tensor:
    """What rows are multiplied by, one vector in ``dtype``."""
    weight = weight.reshape(-1).to(dtype)
    return 1 + weight if zero_centered_gamma else weight


def _output_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    return x.dtype if weight is None else weight.dtype


def _statistics(x: Tensor, *numbers: Tensor) -> list[Tensor]:
    return [n.reshape(-1).to(statistics_dtype(x.dtype)) for n in numbers]


def _undo(y: Tensor, weight: Tensor | None, eps: float, zero_centered_gamma: bool) -> Tensor:
    """Divide by the scale, at least ``eps`` in magnitude; by 1 without a weight."""
    if weight is None:
        return y
    scale = _scale(weight, y.dtype, zero_centered_gamma)
    smallest = max(eps, torch.finfo(y.dtype).tiny)
    return y / torch.copysign(scale.abs().clamp(min=smallest), scale)


layer_norm = Formula(
    "fused_layer_norm",
    ops.layer_norm_forward,
    ops.layer_norm_backward,
    layer_norm_reference,
    saves=("x", "weight", "mean", "rstd", "columns", "zero_centered_gamma"),
    grads=("x", "weight", "bias"),
    rows={"x": 1},
    shared=("weight", "bias"),
    plain_backward=_layer_norm_backward,
)
layer_norm_from_output = layer_norm.from_output(
    ("y", "weight", "bias", "rstd", "columns", "eps", "zero_centered_gamma"),
    ops.layer_norm_backward_from_output,
    _layer_norm_backward_from_output,
)
rms_norm = Formula(
    "fused_rms_norm",
    ops.rms_norm_forward,
    ops.rms_norm_backward,
    rms_norm_reference,
    saves=("x", "weight", "rstd", "columns", "zero_centered_gamma"),
    grads=("x", "weight"),
    rows={"x": 1},
    shared=("weight",),
    plain_backward=_norm_backward,
)
rms_norm_from_output = rms_norm.from_output(
    ("y", "weight", "rstd", "columns", "eps", "zero_centered_gamma"),
    ops.rms_norm_backward_from_output,
    _norm_backward_from_output,
)


class Norm(NamedTuple):
    """A normalization, whose backward starts from its input or, to save memory, its output."""

    name: str
    from_input: Formula
    from_output: Formula


LAYER_NORM = Norm("layer_norm", layer_norm, layer_norm_from_output)
RMS_NORM = Norm("rms_norm", rms_norm, rms_norm_from_output)

# Operators of this package and what they are in ATen's. A table of our own: in torch's they would
# break ``torch.compile`` where the environment variable ``CI`` is set, as Inductor then refuses to
# leave whole what torch's table splits.
TABLE: dict[Any, Callable[..., Any]] = {
    op: function
    for norm in (LAYER_NORM, RMS_NORM)
    for formula in norm[1:]
    for op, function in formula.decompositions().items()
}


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table for ``ExportedProgram.run_decompositions``, of all operators of this package.

    Example:
        >>> program = torch.export.export(FusedLayerNorm(8), (torch.randn(2, 8),))
        >>> program = program.run_decompositions(decompositions())  # only ATen operators
    """
    return dict(TABLE)


def kernel_dtypes(
    x_dtype: torch.dtype, weight_dtype: torch.dtype, from_output: bool = False
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of input and weight to cast to, so that a kernel takes the pair.

    Kernels take equal dtypes and, unless they work from the output, a 16-bit input with a float32
    weight. Other pairs go to the wider of the two, at least float32: the casts before the kernel
    are exact, and the result is rounded once more only to a dtype that it has to be rounded to
    anyhow.
    """
    if x_dtype == weight_dtype:
        return x_dtype, weight_dtype
    if x_dtype in _HALVES and weight_dtype == torch.float32 and not from_output:
        return x_dtype, weight_dtype
    if torch.float64 in (x_dtype, weight_dtype):
        return torch.float64, torch.float64
    return torch.float32, torch.float32


def result_dtype(x: Tensor, weight: Tensor | None, mixed: bool) -> torch.dtype:
    """The dtype of a result: with ``mixed`` the weight's, else the input's, as from torch's norms.

    Of a 16-bit weight with a wider input the result has the weight's in any case: a layer of
    16-bit weights follows then, as in T5, whose feed-forward layers return float32.
    """
    if weight is None or weight.dtype == x.dtype:
        return x.dtype
    is_narrow = weight.dtype in _HALVES and x.dtype not in _HALVES
    return weight.dtype if mixed or is_narrow else x.dtype


def run(
    formula: Formula,
    x: Tensor,
    parameters: Sequence[Tensor | None],
    shape: tuple[int, ...],
    eps: float,
    zero_centered_gamma: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Normalize checked operands: as rows and vectors, in dtypes for which there is a kernel.

    The kernels return the weight's dtype, which is rounded to ``dtype`` where that is another.
    """
    weight, options = parameters[0], (math.prod(shape), eps, zero_centered_gamma)
    out_dtype = _output_dtype(x, weight)
    x_dtype, weight_dtype = kernel_dtypes(x.dtype, out_dtype)
    rows = as_rows(x, len(shape))
    vectors = [as_vector(p, weight_dtype) for p in parameters]
    y = formula(exact(rows, x_dtype), *vectors, *options)
    y = y if rows is x else y.reshape(x.shape)
    return y if y.dtype == dtype else y.to(dtype)
