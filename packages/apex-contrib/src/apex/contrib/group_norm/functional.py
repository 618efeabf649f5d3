"""Group normalization of channels-last samples: checks, and the way to the kernels and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.native.operands import are_exact, check_floating, exact, replicate_like
from .._shared.native.plain import explain, plainness
from .group_norm_nhwc.formula import group_norm_nhwc

NAME = "GroupNorm"
_ACTIVATIONS = {None: False, "": False, "silu": True, "swish": True}


def group_norm(
    x: Tensor,
    G: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    act: str | None = None,
    *,
    zero_centered_gamma: bool = False,
) -> Tensor:
    r"""Group normalization by our kernels, on every device.

    .. math::
        p = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot w + b, \qquad
        y = p \text{ or } \frac{p}{1 + e^{-p}}

    with mean and biased variance over all elements of a sample's group of C / G channels.

    Args:
        x: ``[N, C, *]``; float64, float32, float16 or bfloat16. Without a copy where it is
            channels-last in memory.
        G: number of groups, which divides C.
        weight, bias: ``[C]``, or None for one and zero; both in float32, float16 or bfloat16, or in
            float64 for float64.
        eps: added to the variance.
        act: "silu" or "swish" for SiLU; "" or None for none.
        zero_centered_gamma: multiply by ``1 + weight``, summed in what all is computed in.

    Returns:
        ``[N, C, *]`` in the dtype of ``x``, channels-last in memory. Computed in float32, or in
        float64 for float64. Autocast changes nothing.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: shapes or devices do not fit, ``eps`` is negative, or ``act`` is another word.

    Source:
        Wu & He 2018, "Group normalization", https://arxiv.org/abs/1803.08494
    """
    silu = _ACTIVATIONS[act] if act in _ACTIVATIONS else is_silu(act)
    try:
        if (
            (answer := plainness(x, weight, bias))
            and type(eps) is float
            and (weight is None or bias is None or weight.dtype is bias.dtype)
            and not x.is_meta
        ):
            return group_norm_nhwc.plain[answer](x, weight, bias, G, eps, silu, zero_centered_gamma)
    except (AttributeError, RuntimeError):  # of None, and of the operator's checks
        if are_exact(weight, bias):
            explain(check, x, G, weight, bias, eps)
    check(x, G, weight, bias, eps)
    if weight is not None:
        weight = exact(replicate_like(x, weight))
    if bias is not None:
        bias = exact(replicate_like(x, bias))
    return group_norm_nhwc(x, weight, bias, G, float(eps), silu, zero_centered_gamma)


def is_nhwc(x: Tensor) -> bool:
    """Whether ``x`` ``[N, C, *]`` is channels-last in memory."""
    if x.dim() == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.dim() > 1 and x.movedim(1, -1).is_contiguous()


def channels_second(x: Tensor, weight: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """``x`` as ``[N, C, H, W]``, and what gives a result the shape that ``x`` has.

    ``x`` is that, channels-last in memory, or contiguous ``[N, H, W, C]``.
    """
    if x.dim() == 4 and is_nhwc(x) and (not x.is_contiguous() or x.shape[1] == weight.shape[0]):
        return x, lambda result: result
    return x.movedim(-1, 1), lambda result: result.movedim(1, -1)


def is_silu(act: str | None) -> bool:
    """Whether an activation of this name is SiLU.

    Raises:
        ValueError: it is none that we know.
    """
    if act not in _ACTIVATIONS:
        raise ValueError(f'{NAME}: act must be "silu", "swish", "" or None, got {act!r}.')
    return _ACTIVATIONS[act]


def check(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    """Raise TypeError or ValueError for operands that the kernels do not take."""
    check_floating(NAME, "x", x)
    if x.dim() < 2 or x.shape[1] == 0:
        raise ValueError(f"{NAME}: x must have shape [N, C, *] with C > 0, got {list(x.shape)}.")
    channels = x.shape[1]
    if groups < 1 or channels % groups:
        raise ValueError(
            f"{NAME}: the number of groups must divide the {channels} channels of x "
            f"{list(x.shape)}, got {groups}."
        )
    if not eps >= 0:
        raise ValueError(f"{NAME}: eps must not be negative, got {eps}.")
    for argument, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        check_floating(NAME, argument, tensor)
        if (tensor.dtype == torch.float64) != (x.dtype == torch.float64):
            raise TypeError(f"{NAME}: {argument} is {tensor.dtype}, but x is {x.dtype}; cast one.")
        if tensor.shape != (channels,) or tensor.device != x.device:
            raise ValueError(
                f"{NAME}: {argument} must have shape [{channels}] on {x.device}, as the channels "
                f"of x {list(x.shape)}; got {list(tensor.shape)} on {tensor.device}."
            )
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise TypeError(f"{NAME}: bias is {bias.dtype}, but weight is {weight.dtype}; cast one.")
