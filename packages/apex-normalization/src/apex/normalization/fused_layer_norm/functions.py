"""The autograd functions of layer and RMS normalization, under the names that Apex's users apply.

They stay classes with an explicit ``memory_efficient`` argument of ``forward``: Megatron inspects
its signature. Each validates its arguments, so ``apply`` is as safe as the functions are.
``torch.func`` cannot transform such classes: for it each has ``plain``, the formula without fusion.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._shared.native.transforms import differentiated_again, refuse_transforms
from . import plain
from .checks import as_shape, check_operands, check_recoverable
from .compute import Shape, layer_norm, layer_norm_gradients, rms_norm, rms_norm_gradients
from .dtypes import rms_eps

REMEDY = "Use the functions and modules of apex.normalization instead of their autograd classes."


class _NoSecondDerivative(Function):
    """Passes gradients through, and refuses to be differentiated.

    ``once_differentiable`` would do that only where the gradient itself requires one; a gradient
    penalty on ``y.sum()`` would be ignored in silence.
    """

    @staticmethod
    def forward(ctx, name, count, *tensors):
        ctx.name = name
        return tuple(t if t is None else t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            f"{ctx.name}: with memory_efficient=True the gradient cannot be differentiated again, "
            "because the input is not kept. Use memory_efficient=False where a second derivative "
            "is needed."
        )

    jvp = backward  # forward mode over a gradient


def _refusing(ctx: Any, compute: Any, dy: Tensor, *options: bool):
    """Return compute's gradients, which refuse a second derivative."""
    with torch.no_grad():
        grads = compute(ctx, dy, *options)
    return _NoSecondDerivative.apply(ctx.name, len(grads), *grads, dy, *ctx.saved_tensors)


def _layer_norm(
    ctx: Any, name: str, x: Tensor, weight, bias, shape: Shape, eps, memory_efficient, mixed
) -> Tensor:
    """Run the forward; save what the backward reads, unless ``ctx`` is None: then there is none."""
    if ctx is not None:
        refuse_transforms(name, REMEDY)
    y, mean, rstd = layer_norm(name, x, weight, bias, shape, eps, mixed)
    if ctx is None:
        return y
    ctx.name, ctx.shape, ctx.eps, ctx.x_dtype = name, shape, eps, x.dtype
    ctx.memory_efficient, ctx.has_bias = memory_efficient, bias is not None
    if memory_efficient:
        check_recoverable(name, ctx, weight)
        ctx.save_for_backward(y, weight, bias, None, rstd)
    else:
        ctx.save_for_backward(x, weight, None, mean, rstd)
    return y


def _fused_layer_norm_grads(ctx: Any, dy: Tensor, weight_grads: bool):
    dx, dweight, dbias = layer_norm_gradients(
        dy, *ctx.saved_tensors, ctx.shape, ctx.eps, ctx.x_dtype, ctx.memory_efficient, weight_grads
    )
    return dx, dweight, dbias if ctx.has_bias else None


def _layer_norm_grads(ctx: Any, dy: Tensor, weight_grads: bool):
    """Return dx, dweight and dbias, the latter None where not wanted; plain with create_graph."""
    if not differentiated_again():
        return _fused_layer_norm_grads(ctx, dy, weight_grads)
    if ctx.memory_efficient:
        return _refusing(ctx, _fused_layer_norm_grads, dy, weight_grads)
    x, weight = ctx.saved_tensors[:2]
    dims = len(as_shape(ctx.shape))
    dx, dweight, dbias = plain.layer_norm_gradients(dy, x, weight, dims, ctx.eps)
    return dx, dweight if weight_grads else None, dbias if weight_grads and ctx.has_bias else None


def _rms_norm(
    ctx: Any, name: str, x: Tensor, weight, shape: Shape, eps, memory_efficient, mixed
) -> Tensor:
    """Run the forward; save what the backward reads, unless ``ctx`` is None: then there is none."""
    if ctx is not None:
        refuse_transforms(name, REMEDY)
    eps = rms_eps(x, eps)
    y, rstd = rms_norm(name, x, weight, shape, eps, mixed)
    if ctx is None:
        return y
    ctx.name, ctx.shape, ctx.eps, ctx.x_dtype = name, shape, eps, x.dtype
    ctx.memory_efficient = memory_efficient
    if memory_efficient:
        check_recoverable(name, ctx, weight)
    ctx.save_for_backward(y if memory_efficient else x, weight, rstd)
    return y


def _fused_rms_norm_grads(ctx: Any, dy: Tensor, weight_grads: bool):
    return rms_norm_gradients(
        dy, *ctx.saved_tensors, ctx.shape, ctx.eps, ctx.x_dtype, ctx.memory_efficient, weight_grads
    )


def _rms_norm_grads(ctx: Any, dy: Tensor, weight_grads: bool):
    """Return dx and dweight, the latter None where not wanted; plain with create_graph."""
    if not differentiated_again():
        return _fused_rms_norm_grads(ctx, dy, weight_grads)
    if ctx.memory_efficient:
        return _refusing(ctx, _fused_rms_norm_grads, dy, weight_grads)
    x, weight = ctx.saved_tensors[:2]
    dx, dweight = plain.rms_norm_gradients(dy, x, weight, len(as_shape(ctx.shape)), ctx.eps)
    return dx, dweight if weight_grads else None


def _plain_layer_norm(name: str, x: Tensor, weight, bias, shape: Shape, eps: float, mixed: bool):
    shape = as_shape(shape)
    check_operands(name, x, weight, bias, shape, eps, mixed)
    dtype = x.dtype if weight is None else weight.dtype
    return plain.layer_norm(x, weight, bias, len(shape), eps, dtype)[0]


def _plain_rms_norm(name: str, x: Tensor, weight, shape: Shape, eps: float | None, mixed: bool):
    shape, eps = as_shape(shape), rms_eps(x, eps)
    check_operands(name, x, weight, None, shape, eps, mixed)
    return plain.rms_norm(x, weight, len(shape), eps, x.dtype if weight is None else weight.dtype)[
        0
    ]


class FusedLayerNormAffineFunction(Function):
    """Layer normalization with weight and bias, both in the input's dtype; bias may be None."""

    @staticmethod
    def forward(ctx, input, weight, bias, normalized_shape, eps, memory_efficient=False):
        return _layer_norm(
            ctx,
            "fused_layer_norm_affine",
            input,
            weight,
            bias,
            normalized_shape,
            eps,
            memory_efficient,
            mixed=False,
        )

    @staticmethod
    def plain(input, weight, bias, normalized_shape, eps, memory_efficient=False):
        return _plain_layer_norm(
            "fused_layer_norm_affine", input, weight, bias, normalized_shape, eps, False
        )

    @staticmethod
    def backward(ctx, grad_output):
        wanted = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        return *_layer_norm_grads(ctx, grad_output, wanted), None, None, None


class FusedLayerNormAffineMixedDtypesFunction(FusedLayerNormAffineFunction):
    """Layer normalization whose output has the dtype of weight and bias, whatever the input's."""

    @staticmethod
    def forward(ctx, input, weight, bias, normalized_shape, eps, memory_efficient=False):
        return _layer_norm(
            ctx,
            "mixed_dtype_fused_layer_norm_affine",
            input,
            weight,
            bias,
            normalized_shape,
            eps,
            memory_efficient,
            mixed=True,
        )

    @staticmethod
    def plain(input, weight, bias, normalized_shape, eps, memory_efficient=False):
        return _plain_layer_norm(
            "mixed_dtype_fused_layer_norm_affine", input, weight, bias, normalized_shape, eps, True
        )


class FusedLayerNormFunction(Function):
    """Layer normalization without weight and bias."""

    @staticmethod
    def forward(ctx, input, normalized_shape, eps, memory_efficient=False):
        return _layer_norm(
            ctx,
            "fused_layer_norm",
            input,
            None,
            None,
            normalized_shape,
            eps,
            memory_efficient,
            mixed=False,
        )

    @staticmethod
    def plain(input, normalized_shape, eps, memory_efficient=False):
        return _plain_layer_norm(
            "fused_layer_norm", input, None, None, normalized_shape, eps, False
        )

    @staticmethod
    def backward(ctx, grad_output):
        return _layer_norm_grads(ctx, grad_output, False)[0], None, None, None


class FusedRMSNormAffineFunction(Function):
    """RMS normalization with a weight in the input's dtype."""

    @staticmethod
    def forward(ctx, input, weight, normalized_shape, eps, memory_efficient=False):
        return _rms_norm(
            ctx,
            "fused_rms_norm_affine",
            input,
            weight,
            normalized_shape,
            eps,
            memory_efficient,
            mixed=False,
        )

    @staticmethod
    def plain(input, weight, normalized_shape, eps, memory_efficient=False):
        return _plain_rms_norm("fused_rms_norm_affine", input, weight, normalized_shape, eps, False)

    @staticmethod
    def backward(ctx, grad_output):
        wanted = ctx.needs_input_grad[1]
        return *_rms_norm_grads(ctx, grad_output, wanted), None, None, None


class FusedRMSNormAffineMixedDtypesFunction(FusedRMSNormAffineFunction):
    """RMS normalization whose output has the weight's dtype, whatever the input's."""

    @staticmethod
    def forward(ctx, input, weight, normalized_shape, eps, memory_efficient=False):
        return _rms_norm(
            ctx,
            "mixed_dtype_fused_rms_norm_affine",
            input,
            weight,
            normalized_shape,
            eps,
            memory_efficient,
            mixed=True,
        )

    @staticmethod
    def plain(input, weight, normalized_shape, eps, memory_efficient=False):
        return _plain_rms_norm(
            "mixed_dtype_fused_rms_norm_affine", input, weight, normalized_shape, eps, True
        )


class FusedRMSNormFunction(Function):
    """RMS normalization without weight."""

    @staticmethod
    def forward(ctx, input, normalized_shape, eps, memory_efficient=False):
        return _rms_norm(
            ctx,
            "fused_rms_norm",
            input,
            None,
            normalized_shape,
            eps,
            memory_efficient,
            mixed=False,
        )

    @staticmethod
    def plain(input, normalized_shape, eps, memory_efficient=False):
        return _plain_rms_norm("fused_rms_norm", input, None, normalized_shape, eps, False)

    @staticmethod
    def backward(ctx, grad_output):
        return _rms_norm_grads(ctx, grad_output, False)[0], None, None, None
