"""Checks, casts and kernel calls of the operators under Apex's names, without autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._shared.native.operands import exact, statistics_dtype
from . import ops
from .checks import as_shape, check_operands
from .formulas import kernel_dtypes

Shape = int | Sequence[int]


def layer_norm(
    name: str, x: Tensor, weight, bias, normalized_shape: Shape, eps: float, mixed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, mean and rstd; ``name`` is the caller's, for messages."""
    shape = as_shape(name, normalized_shape)
    check_operands(name, x, weight, bias, shape, eps, mixed)
    out_dtype = x.dtype if weight is None else weight.dtype
    x_dtype, weight_dtype = kernel_dtypes(x.dtype, out_dtype)
    y, mean, rstd = ops.layer_norm_forward(
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
    shape = as_shape(name, normalized_shape)
    check_operands(name, x, weight, None, shape, eps, mixed)
    out_dtype = x.dtype if weight is None else weight.dtype
    x_dtype, weight_dtype = kernel_dtypes(x.dtype, out_dtype)
    y, rstd = ops.rms_norm_forward(
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
    columns = math.prod(as_shape("layer_norm_backward", normalized_shape))
    dy_, weight_ = exact(dy, weight_dtype), operand(weight, weight_dtype)
    if from_output:
        dx, dweight, dbias = ops.layer_norm_backward_from_output(
            dy_, exact(saved, weight_dtype), weight_, operand(bias, weight_dtype), rstd, columns,
            eps, weight_grads,
        )  # fmt: skip
    else:
        dx, dweight, dbias = ops.layer_norm_backward(
            dy_, exact(saved, x_dtype), weight_, mean, rstd, columns, weight_grads
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
    columns = math.prod(as_shape("rms_norm_backward", normalized_shape))
    dy_, weight_ = exact(dy, weight_dtype), operand(weight, weight_dtype)
    if from_output:
        dx, dweight = ops.rms_norm_backward_from_output(
            dy_, exact(saved, weight_dtype), weight_, rstd, columns, eps, weight_grads
        )
    else:
        dx, dweight = ops.rms_norm_backward(
            dy_, exact(saved, x_dtype), weight_, rstd, columns, weight_grads
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


def cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return ``tensor`` in ``dtype``; itself when it has that, which costs no call of torch."""
    if tensor is None or tensor.dtype == dtype:
        return tensor
    return tensor.to(dtype)


def operand(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return an optional ``tensor`` as kernels take it."""
    return None if tensor is None else exact(tensor, dtype)
