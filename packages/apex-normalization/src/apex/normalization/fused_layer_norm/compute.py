"""Checks, casts and kernel calls of normalization and its gradient, without autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import as_shape, check_operands
from .dtypes import cast, kernel_dtypes, operand, statistics_dtype
from .ops import layer_norm_backward, layer_norm_forward, rms_norm_backward, rms_norm_forward

Shape = int | Sequence[int]


def layer_norm(
    name: str, x: Tensor, weight, bias, normalized_shape: Shape, eps: float, mixed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, mean and rstd; ``name`` is the caller's, for messages."""
    shape = as_shape(normalized_shape)
    check_operands(name, x, weight, bias, shape, eps, mixed)
    out_dtype = x.dtype if weight is None else weight.dtype
    x_dtype, weight_dtype = kernel_dtypes(x.dtype, out_dtype)
    y, mean, rstd = layer_norm_forward(
        operand(x, x_dtype),
        operand(weight, weight_dtype),
        operand(bias, weight_dtype),
        math.prod(shape),
        eps,
    )
    return cast(y, out_dtype), mean, rstd


def rms_norm(
    name: str, x: Tensor, weight, normalized_shape: Shape, eps: float, mixed: bool
) -> tuple[Tensor, Tensor]:
    """Return y and rstd; ``name`` is the caller's, for messages."""
    shape = as_shape(normalized_shape)
    check_operands(name, x, weight, None, shape, eps, mixed)
    out_dtype = x.dtype if weight is None else weight.dtype
    x_dtype, weight_dtype = kernel_dtypes(x.dtype, out_dtype)
    y, rstd = rms_norm_forward(
        operand(x, x_dtype), operand(weight, weight_dtype), math.prod(shape), eps
    )
    return cast(y, out_dtype), rstd


def layer_norm_gradients(
    dy: Tensor,
    saved: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    normalized_shape: Shape,
    eps: float,
    dx_dtype: torch.dtype,
    from_output: bool,
    weight_grads: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return dx, dweight and dbias, the latter two in dy's dtype or None without weight_grads."""
    x_dtype, weight_dtype = kernel_dtypes(dx_dtype, dy.dtype, from_output)
    dx, dweight, dbias = layer_norm_backward(
        operand(dy, weight_dtype),
        operand(saved, weight_dtype if from_output else x_dtype),
        operand(weight, weight_dtype),
        operand(bias, weight_dtype),
        mean,
        rstd,
        math.prod(as_shape(normalized_shape)),
        eps,
        x_dtype,
        from_output,
        weight_grads,
    )
    dx = cast(dx, dx_dtype)
    if not weight_grads:
        return dx, None, None
    return dx, _like(dweight, weight, dy.dtype), _like(dbias, weight, dy.dtype)


def rms_norm_gradients(
    dy: Tensor,
    saved: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    normalized_shape: Shape,
    eps: float,
    dx_dtype: torch.dtype,
    from_output: bool,
    weight_grads: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return dx and dweight, the latter in dy's dtype or None without weight_grads."""
    x_dtype, weight_dtype = kernel_dtypes(dx_dtype, dy.dtype, from_output)
    dx, dweight = rms_norm_backward(
        operand(dy, weight_dtype),
        operand(saved, weight_dtype if from_output else x_dtype),
        operand(weight, weight_dtype),
        rstd,
        math.prod(as_shape(normalized_shape)),
        eps,
        x_dtype,
        from_output,
        weight_grads,
    )
    dx = cast(dx, dx_dtype)
    return dx, _like(dweight, weight, dy.dtype) if weight_grads else None


def in_input_dtype(x: Tensor, y: Tensor, *statistics: Tensor) -> tuple[Tensor, ...]:
    """Return y, and mean and rstd in the statistics' dtype of ``x``, as Apex's kernels return them.

    Those of a float64 kernel, which a float64 weight asks for, are wider.
    """
    return y, *(cast(s, statistics_dtype(x.dtype)) for s in statistics)


def as_statistics(
    dx_dtype: torch.dtype, dy_dtype: torch.dtype, from_output: bool, *statistics: Tensor | None
) -> list[Tensor | None]:
    """Return mean and rstd in the dtype that the kernel of a gradient takes.

    For callers that know the saved tensor alone, or went through :func:`in_input_dtype`; the
    autograd functions keep what the forward's kernel returned, which fits.
    """
    x_dtype, _ = kernel_dtypes(dx_dtype, dy_dtype, from_output)
    return [cast(s, statistics_dtype(x_dtype)) for s in statistics]


def _like(sums: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``sums`` in ``dtype`` and the weight's shape; they are a vector, as weights mostly are."""
    sums = cast(sums, dtype)
    return sums if weight.dim() == 1 else sums.view_as(weight)
