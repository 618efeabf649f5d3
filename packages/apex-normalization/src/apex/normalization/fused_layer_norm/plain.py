"""The same formulas in plain PyTorch: for transforms, for higher derivatives, and for export.

Everything is computed in the statistics' dtype and rounded once, as by the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dtypes import statistics_dtype


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y in ``dtype``, mean and rstd ``[..., 1]``, normalized over the last ``dims``."""
    wide = _wide(x, x.dtype, dtype)
    over = _last(dims)
    mean = wide.mean(over, keepdim=True)
    deviation = wide - mean
    rstd = torch.rsqrt(deviation.square().mean(over, keepdim=True) + eps)
    y = deviation * rstd
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(dtype), mean, rstd


def rms_norm(
    x: Tensor, weight: Tensor | None, dims: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return y in ``dtype`` and rstd ``[..., 1]``, normalized over the last ``dims``."""
    wide = _wide(x, x.dtype, dtype)
    rstd = torch.rsqrt(wide.square().mean(_last(dims), keepdim=True) + eps)
    y = wide * rstd
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y.to(dtype), rstd


def layer_norm_gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, dims: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, and dweight and dbias in the weight's dtype; all can be differentiated again."""
    wide, grad = _wide(x, x.dtype, dy.dtype), _wide(dy, x.dtype, dy.dtype)
    over = _last(dims)
    deviation = wide - wide.mean(over, keepdim=True)
    rstd = torch.rsqrt(deviation.square().mean(over, keepdim=True) + eps)
    xhat = deviation * rstd
    g = grad if weight is None else grad * weight.to(grad.dtype)
    dx = rstd * (g - g.mean(over, keepdim=True) - xhat * (g * xhat).mean(over, keepdim=True))
    dtype = dy.dtype if weight is None else weight.dtype
    sums = [sum_rows(t, dims).to(dtype) for t in (grad * xhat, grad)]
    return dx.to(x.dtype), *sums


def rms_norm_gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, dims: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Return dx, and dweight in the weight's dtype; both can be differentiated again."""
    wide, grad = _wide(x, x.dtype, dy.dtype), _wide(dy, x.dtype, dy.dtype)
    over = _last(dims)
    rstd = torch.rsqrt(wide.square().mean(over, keepdim=True) + eps)
    xhat = wide * rstd
    g = grad if weight is None else grad * weight.to(grad.dtype)
    dx = rstd * (g - xhat * (g * xhat).mean(over, keepdim=True))
    dtype = dy.dtype if weight is None else weight.dtype
    return dx.to(x.dtype), sum_rows(grad * xhat, dims).to(dtype)


def sum_rows(tensor: Tensor, dims: int) -> Tensor:
    """Sum over all but the last ``dims`` dimensions."""
    rows = tuple(range(tensor.dim() - dims))
    return tensor.sum(rows) if rows else tensor


def _last(dims: int) -> tuple[int, ...]:
    return tuple(range(-dims, 0))


def _wide(tensor: Tensor, x_dtype: torch.dtype, y_dtype: torch.dtype) -> Tensor:
    return tensor.to(statistics_dtype(torch.promote_types(x_dtype, y_dtype)))
