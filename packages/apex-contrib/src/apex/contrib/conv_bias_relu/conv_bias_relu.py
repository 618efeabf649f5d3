"""Convolutions with what follows them: torch's convolution, and gradients in one pass less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._shared.native.composed import Composed, plainly
from .._shared.native.half_matmul import is_slow
from .._shared.native.named_functions import NamedFunction
from .._shared.native.operands import autocast
from .._shared.native.transforms import is_transformed
from ..dense_epilogue import RELU, decompositions, dense_activation_backward
from .operands import (
    check_convolution,
    check_mask,
    check_mask_shape,
    check_vector,
    check_window,
    pair,
)

__all__ = [
    "ConvBias",
    "ConvBiasMaskReLU",
    "ConvBiasMaskReLU_",
    "ConvBiasReLU",
    "ConvBiasReLU_",
    "ConvBias_",
    "ConvFrozenScaleBiasReLU",
    "ConvFrozenScaleBiasReLU_",
    "decompositions",
]

_HALVES = torch.float16, torch.bfloat16
_Pair = tuple[int, int]
_Option = tuple[bool, _Pair, _Pair]  # ReLU?, padding, stride


def _channels(vector: Tensor) -> Tensor:
    return vector.view(-1, 1, 1)


def _rows(image: Tensor) -> Tensor:
    """``[N, C, H, W]`` as ``[N, H, W, C]``; no copy of a tensor in channels_last."""
    return image.permute(0, 2, 3, 1).contiguous()


def _channels_last(image: Tensor) -> Tensor:
    """``image`` in that memory format; no copy if it has it.

    Unchanged within ``torch.func``, because vmap allows no request for it.
    """
    # Asked first, because torch 2.11's compiler loses the gradient of an output of contiguous()
    # that is its input.
    if is_transformed() or image.is_contiguous(memory_format=torch.channels_last):
        return image
    return image.contiguous(memory_format=torch.channels_last)


def _reference(
    option: _Option,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor,
    mask: Tensor | None,
) -> Tensor:
    has_relu, padding, stride = option
    if scale is None:
        y = F.conv2d(x, weight, bias, stride, padding)
    else:
        y = F.conv2d(x, weight, None, stride, padding) * _channels(scale) + _channels(bias)
    y = y if mask is None else y * mask
    return torch.relu(y) if has_relu else y


def _folded(weight: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scaled weights and None, where that rounds no more than 32 bits do: it spares a pass over
    the output in each direction. Else what is given.
    """
    if scale is None or weight.dtype in _HALVES:
        return weight, scale
    return weight * scale.view(-1, 1, 1, 1), None


def _forward(
    option: _Option,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, ...]:
    """The output; and again for the backward, which takes the ReLU from it."""
    has_relu, padding, stride = option
    weight, scale = _folded(weight, scale)
    if scale is None:
        y = F.conv2d(x, weight, bias, stride, padding)
    else:
        y = F.conv2d(x, weight, None, stride, padding)
        y = torch.addcmul(_channels(bias), y, _channels(scale))
    y = _channels_last(y)  # torch's float64 convolutions on GPUs give another format
    if mask is not None:
        check_mask_shape(mask, y)
        y.mul_(mask)
    if not has_relu:
        return (y,)
    # Compiled by torch 2.11, an output that was written in place would get no gradient.
    y = torch.relu(y) if torch.compiler.is_compiling() else y.relu_()
    return y, y


def _backward(
    option: _Option, needs: Sequence[bool], dy: Tensor, saved: Sequence[Tensor]
) -> list[Tensor | None]:
    has_relu, padding, stride = option
    x, weight, scale, _, mask, *kept = saved
    dbias = None
    if has_relu:
        # Where the mask is 0 or 1, the output tells: it is 0 where the mask is.
        multiplies = mask is not None and mask.dtype is not torch.bool
        sums = needs[3] and not multiplies
        rows, dbias = dense_activation_backward(_rows(dy), _rows(kept[0]), RELU, sums)
        dy = rows.permute(0, 3, 1, 2)
        if multiplies:
            dy = dy * mask
        dbias = dbias if sums else None
    if needs[3] and dbias is None:
        dbias = dy.sum((0, 2, 3))
    weight, unfolded = _folded(weight, scale)
    if unfolded is not None:
        dy = dy * _channels(unfolded)
    dx = dweight = None
    if needs[0] or needs[1]:
        dx, dweight, _ = torch.ops.aten.convolution_backward(
            *(dy, x, weight, None, stride, padding, (1, 1), False, (0, 0), 1),
            (needs[0], needs[1], False),
        )
        if dx is not None:
            dx = _channels_last(dx)  # as x is
        if dweight is not None and scale is not None and unfolded is None:
            dweight = dweight * scale.view(-1, 1, 1, 1)
    return [dx, dweight, None, dbias, None]


_convolution = Composed("conv_bias_relu", _forward, _backward, _reference)


def _apply(
    name: str,
    has_relu: bool,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    padding: int | _Pair,
    stride: int | _Pair,
    **extra: Tensor,
) -> Tensor:
    """``extra`` is a scale or a mask."""
    for argument, tensor in extra.items():
        if not isinstance(tensor, Tensor):
            got = type(tensor).__name__
            raise TypeError(f"{name}: {argument} must be a tensor, got {got}.")
    scale, mask = extra.get("scale"), extra.get("mask")
    x, weight, scale, bias, mask = autocast(x, weight, scale, bias, mask)
    option = check(name, has_relu, x, weight, bias, padding, stride, scale, mask)
    if scale is not None:
        scale, bias = scale.detach().reshape(-1), bias.detach()
    if mask is not None:
        mask = mask.detach() if mask.dtype is torch.bool else mask.detach().to(x.dtype)
    bias = bias if bias.dim() == 1 else bias.reshape(-1)
    given = _channels_last(x), weight, scale, bias, mask
    if is_slow(x):
        return _convolution(option, *wide(given)).to(x.dtype)
    return _convolution(option, *given)


def check(
    name: str,
    has_relu: bool,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    padding: int | _Pair,
    stride: int | _Pair,
    scale: Tensor | None,
    mask: Tensor | None,
) -> _Option:
    """Raise TypeError or ValueError for what a function does not take; return its option."""
    check_convolution(name, x, weight)
    check_vector(name, "bias", bias, x, weight)
    if scale is not None:
        check_vector(name, "scale", scale, x, weight)
    if mask is not None:
        check_mask(name, mask, x)
    padding, stride = pair(name, "padding", padding, 0), pair(name, "stride", stride, 1)
    check_window(name, x, weight, padding)
    return has_relu, padding, stride


def wide(tensors: Sequence[Any]) -> list[Any]:
    """The 16-bit ones in float32."""
    return [t.float() if t is not None and t.dtype in _HALVES else t for t in tensors]


def run(option: _Option, x: Tensor, *others: Tensor | None) -> Tensor:
    """The output, without gradients and autocast; tensors as :func:`_forward` takes them."""
    given = wide((x, *others)) if is_slow(x) else [x, *others]
    with torch.no_grad():
        last = given[0].contiguous(memory_format=torch.channels_last)
        return plainly(x, _forward, option, last, *given[1:])[0].to(x.dtype)


def gradients(option: _Option, dy: Tensor, *saved: Tensor | None) -> list[Tensor]:
    """Gradients of x, weight and bias, without autocast; ``saved`` as for :func:`_backward`."""
    given = wide((dy, *saved)) if is_slow(dy) else [dy, *saved]
    needs = (True, True, False, True, False)
    with torch.no_grad():
        found = plainly(dy, _backward, option, needs, given[0], given[1:])
    return [found[i].to(dy.dtype) for i in (0, 1, 3)]


def ConvBiasReLU(
    x: Tensor, weight: Tensor, bias: Tensor, padding: int | _Pair, stride: int | _Pair
) -> Tensor:
    r"""Convolve, add a bias and take the positive part.

    .. math:: y = \max(x \star w + b, 0)

    Args:
        x: ``[N, C, H, W]``; float64, float32, float16 or bfloat16. It is used in the channels_last
            memory format, and converted to it if it has another.
        weight: ``[K, C, R, S]``, of the same dtype.
        bias: ``K`` numbers of the same dtype, as ``[K]`` or ``[1, K, 1, 1]``; its gradient has
            its shape.
        padding: zeros around ``x``, in elements; one number, or two for height and width.
        stride: elements from one window to the next; one number, or two.

    Returns:
        ``[N, K, H', W']`` in channels_last. Under autocast everything is cast to its dtype first,
        but for float64. Inside, autocast is off, in the backward too. It may be differentiated any
        number of times.

    Raises:
        TypeError: a dtype is not one of those above, or the dtypes differ.
        ValueError: a shape, a device, ``padding`` or ``stride`` does not fit.

    Source:
        ``torch.nn.functional.conv2d`` and ReLU; Apex's ``apex.contrib.conv_bias_relu`` has the
        same names.

    Example:
        >>> x, weight = torch.randn(2, 8, 6, 6), torch.randn(4, 8, 3, 3)
        >>> ConvBiasReLU(x, weight, torch.randn(4), 1, 1).shape
        torch.Size([2, 4, 6, 6])
    """
    return _apply("ConvBiasReLU", True, x, weight, bias, padding, stride)


def ConvBias(
    x: Tensor, weight: Tensor, bias: Tensor, padding: int | _Pair, stride: int | _Pair
) -> Tensor:
    """Convolve and add a bias: :func:`ConvBiasReLU` without the ReLU."""
    return _apply("ConvBias", False, x, weight, bias, padding, stride)


def ConvBiasMaskReLU(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mask: Tensor,
    padding: int | _Pair,
    stride: int | _Pair,
) -> Tensor:
    r"""Convolve, add a bias, multiply with a mask and take the positive part.

    .. math:: y = \max((x \star w + b) \, m, 0)

    Args:
        mask: a constant, which gets no gradient: a tensor of any dtype whose four dimensions are
            those of the output, or 1. bool saves a pass in the backward.

    The other arguments, and the errors, are those of :func:`ConvBiasReLU`.
    """
    return _apply("ConvBiasMaskReLU", True, x, weight, bias, padding, stride, mask=mask)


def ConvFrozenScaleBiasReLU(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    padding: int | _Pair,
    stride: int | _Pair,
) -> Tensor:
    r"""Convolve, multiply each channel with a constant, add another, and take the positive part.

    .. math:: y = \max((x \star w) \, s + b, 0)

    Args:
        scale, bias: constants, which get no gradients: ``K`` numbers each, as ``[K]`` or
            ``[1, K, 1, 1]``. They are what a frozen batch norm makes of its statistics.

    The other arguments, and the errors, are those of :func:`ConvBiasReLU`.
    """
    return _apply("ConvFrozenScaleBiasReLU", True, x, weight, bias, padding, stride, scale=scale)


class ConvBiasReLU_(NamedFunction):
    """Apex's class of :func:`ConvBiasReLU`."""

    apply = staticmethod(ConvBiasReLU)


class ConvBias_(NamedFunction):
    """Apex's class of :func:`ConvBias`."""

    apply = staticmethod(ConvBias)


class ConvBiasMaskReLU_(NamedFunction, constants=("mask",)):
    """Apex's class of :func:`ConvBiasMaskReLU`."""

    apply = staticmethod(ConvBiasMaskReLU)


class ConvFrozenScaleBiasReLU_(NamedFunction, constants=("scale", "bias")):
    """Apex's class of :func:`ConvFrozenScaleBiasReLU`."""

    apply = staticmethod(ConvFrozenScaleBiasReLU)
