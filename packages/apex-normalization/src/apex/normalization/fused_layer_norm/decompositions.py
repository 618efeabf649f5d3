"""Decompositions of the operators into ATen's, for exporters that know those alone.

They stand in a table of our own. In torch's they would break ``torch.compile`` where the
environment variable ``CI`` is set: Inductor then refuses to leave whole what torch's table splits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._decomp import register_decomposition
from torch._ops import OpOverload

from . import ops, plain
from .dtypes import statistics_dtype

TABLE: dict[OpOverload, Callable] = {}


def decompositions() -> dict[OpOverload, Callable]:
    """The table for ``ExportedProgram.run_decompositions``, of all operators of this package.

    Example:
        >>> program = torch.export.export(FusedLayerNorm(8), (torch.randn(2, 8),))
        >>> program = program.run_decompositions(decompositions())  # only ATen operators
    """
    return dict(TABLE)


@register_decomposition(ops.layer_norm_forward, TABLE)
def _layer_norm_forward(x, weight, bias, columns, eps):
    y, mean, rstd = plain.layer_norm(
        x.reshape(-1, columns), weight, bias, 1, eps, x.dtype if weight is None else weight.dtype
    )
    return y.reshape(x.shape), *_statistics(x, mean, rstd)


@register_decomposition(ops.rms_norm_forward, TABLE)
def _rms_norm_forward(x, weight, columns, eps):
    dtype = x.dtype if weight is None else weight.dtype
    y, rstd = plain.rms_norm(x.reshape(-1, columns), weight, 1, eps, dtype)
    return y.reshape(x.shape), *_statistics(x, rstd)


@register_decomposition(ops.layer_norm_backward, TABLE)
def _layer_norm_backward(
    dy, saved, weight, bias, mean, rstd, columns, eps, dx_dtype, from_output, weight_grads
):
    grad, values, scale = _backward_operands(dy, saved, rstd, columns, dx_dtype)
    if from_output:
        shift = values if bias is None else values - bias.to(values.dtype)
        xhat = _undo(shift, weight, eps)
    else:
        xhat = (values - mean.reshape(-1, 1).to(values.dtype)) * scale
    g = grad if weight is None else grad * weight.to(grad.dtype)
    dx = scale * (g - g.mean(1, keepdim=True) - xhat * (g * xhat).mean(1, keepdim=True))
    dweight, dbias = (_column_sums(t, dy, weight_grads) for t in (grad * xhat, grad))
    return dx.to(dx_dtype).reshape(saved.shape), dweight, dbias


@register_decomposition(ops.rms_norm_backward, TABLE)
def _rms_norm_backward(dy, saved, weight, rstd, columns, eps, dx_dtype, from_output, weight_grads):
    grad, values, scale = _backward_operands(dy, saved, rstd, columns, dx_dtype)
    xhat = _undo(values, weight, eps) if from_output else values * scale
    g = grad if weight is None else grad * weight.to(grad.dtype)
    dx = scale * (g - xhat * (g * xhat).mean(1, keepdim=True))
    return dx.to(dx_dtype).reshape(saved.shape), _column_sums(grad * xhat, dy, weight_grads)


def _statistics(x: Tensor, *numbers: Tensor) -> list[Tensor]:
    return [n.reshape(-1).to(statistics_dtype(x.dtype)) for n in numbers]


def _backward_operands(dy, saved, rstd, columns, dx_dtype):
    wide = statistics_dtype(dx_dtype)
    rows = [t.reshape(-1, columns).to(wide) for t in (dy, saved)]
    return *rows, rstd.reshape(-1, 1).to(wide)


def _undo(y: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Divide by ``weight``, at least ``eps`` in magnitude; by 1 without one."""
    if weight is None:
        return y
    weight = weight.to(y.dtype)
    smallest = max(eps, torch.finfo(y.dtype).tiny)
    return y / torch.copysign(weight.abs().clamp(min=smallest), weight)


def _column_sums(values: Tensor, dy: Tensor, wanted: bool) -> Tensor:
    return values.sum(0).to(dy.dtype) if wanted else dy.new_empty([0])
