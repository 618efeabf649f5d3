"""The autograd functions of the fused add-and-normalize ops; both return the output and the sum.

As with those of ``fused_layer_norm``, ``plain`` is the formula without fusion, for ``torch.func``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._shared.native.transforms import differentiated_again, refuse_transforms
from ..fused_layer_norm import plain
from ..fused_layer_norm.dtypes import cast, operand, rms_eps
from ..fused_layer_norm.functions import REMEDY
from .checks import check_add_operands
from .ops import (
    add_layer_norm_backward,
    add_layer_norm_forward,
    add_rms_norm_backward,
    add_rms_norm_forward,
)


def _kernel_operands(x: Tensor, residual: Tensor, *parameters: Tensor | None):
    """Return contiguous tensors in dtypes for which there is a kernel; all casts are exact."""
    residual = operand(residual, torch.promote_types(x.dtype, residual.dtype))
    return x.contiguous(), residual, *_kernel_parameters(x.dtype, residual.dtype, *parameters)


def _kernel_parameters(x: torch.dtype, total: torch.dtype, *parameters: Tensor | None):
    dtypes = (x, total)
    return [
        None if p is None else operand(p, p.dtype if dtypes == (p.dtype,) * 2 else _wide(x))
        for p in parameters
    ]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _save(ctx: Any, x: Tensor, residual: Tensor, eps: float, *tensors: Tensor) -> None:
    """Keep what the backward reads, unless ``ctx`` is None: then there is none."""
    if ctx is None:
        return
    ctx.set_materialize_grads(False)
    ctx.x_dtype, ctx.residual_dtype, ctx.eps = x.dtype, residual.dtype, eps
    ctx.save_for_backward(*tensors)


def _input_grads(ctx: Any, like: Tensor, dresidual: Tensor, dx: Tensor):
    """Return the gradients of x and residual in their dtypes, from what a kernel returned."""
    narrow = dx.view(like.shape) if dx.numel() else cast(dresidual, ctx.x_dtype)
    return narrow, cast(dresidual, ctx.residual_dtype)


def _sum_grads(ctx: Any, dsum: Tensor | None):
    """Return the gradients of x and residual where only the sum was used."""
    if dsum is None:
        return None, None
    return cast(dsum, ctx.x_dtype), cast(dsum, ctx.residual_dtype)


def _plus(gradient: Tensor, dsum: Tensor | None) -> Tensor:
    return gradient if dsum is None else gradient + dsum


def _plain_sum(x: Tensor, residual: Tensor) -> Tensor:
    return x + residual


class FusedAddLayerNormFunction(Function):
    """Layer normalization of ``x + residual``: returns the output in x's dtype, and the sum."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps):
        if ctx is not None:
            refuse_transforms("fused_add_layer_norm", REMEDY)
        check_add_operands("fused_add_layer_norm", x, residual, weight, bias, eps)
        operands = _kernel_operands(x, residual, weight, bias)
        y, total, mean, rstd = add_layer_norm_forward(*operands, weight.numel(), eps)
        if ctx is not None:
            ctx.has_bias = bias is not None
        _save(ctx, x, residual, eps, total, weight, mean, rstd)
        return y, total

    @staticmethod
    def plain(x, residual, weight, bias, eps):
        check_add_operands("fused_add_layer_norm", x, residual, weight, bias, eps)
        total = _plain_sum(x, residual)
        return plain.layer_norm(total, weight, bias, weight.dim(), eps, x.dtype)[0], total

    @staticmethod
    def backward(ctx, dy, dsum):
        total, weight, mean, rstd = ctx.saved_tensors
        if dy is None:
            return *_sum_grads(ctx, dsum), None, None, None
        wanted = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        if differentiated_again():  # by formulas that can be
            dims = weight.dim()
            dx, dweight, dbias = plain.layer_norm_gradients(dy, total, weight, dims, ctx.eps)
            grads = _sum_grads(ctx, _plus(dx, dsum))
        else:
            (w,) = _kernel_parameters(dy.dtype, total.dtype, weight)
            dsum = None if dsum is None else dsum.contiguous()
            dresidual, dx, dweight, dbias = add_layer_norm_backward(
                dy.contiguous(), dsum, total, w, mean, rstd, weight.numel(), wanted
            )
            grads = _input_grads(ctx, dy, dresidual, dx)
        if not wanted:
            return *grads, None, None, None
        dweight, dbias = (cast(t, weight.dtype).view_as(weight) for t in (dweight, dbias))
        return *grads, dweight, dbias if ctx.has_bias else None, None


class FusedAddRMSNormFunction(Function):
    """RMS normalization of ``x + residual``: returns the output in x's dtype, and the sum."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        if ctx is not None:
            refuse_transforms("fused_add_rms_norm", REMEDY)
        eps = rms_eps(x, eps)
        check_add_operands("fused_add_rms_norm", x, residual, weight, None, eps)
        operands = _kernel_operands(x, residual, weight)
        y, total, rstd = add_rms_norm_forward(*operands, weight.numel(), eps)
        _save(ctx, x, residual, eps, total, weight, rstd)
        return y, total

    @staticmethod
    def plain(x, residual, weight, eps):
        eps = rms_eps(x, eps)
        check_add_operands("fused_add_rms_norm", x, residual, weight, None, eps)
        total = _plain_sum(x, residual)
        return plain.rms_norm(total, weight, weight.dim(), eps, x.dtype)[0], total

    @staticmethod
    def backward(ctx, dy, dsum):
        total, weight, rstd = ctx.saved_tensors
        if dy is None:
            return *_sum_grads(ctx, dsum), None, None
        wanted = ctx.needs_input_grad[2]
        if differentiated_again():  # by formulas that can be
            dx, dweight = plain.rms_norm_gradients(dy, total, weight, weight.dim(), ctx.eps)
            grads = _sum_grads(ctx, _plus(dx, dsum))
        else:
            (w,) = _kernel_parameters(dy.dtype, total.dtype, weight)
            dsum = None if dsum is None else dsum.contiguous()
            dresidual, dx, dweight = add_rms_norm_backward(
                dy.contiguous(), dsum, total, w, rstd, weight.numel(), wanted
            )
            grads = _input_grads(ctx, dy, dresidual, dx)
        return *grads, cast(dweight, weight.dtype).view_as(weight) if wanted else None, None
