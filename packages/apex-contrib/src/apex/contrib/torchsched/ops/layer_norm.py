"""Layer norm as ``torch.ops.cudnn.layer_norm``: torch's own, on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_library = torch.library.Library("cudnn", "FRAGMENT")


def layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Normalize ``x`` over its last dimensions, which mean and variance are of.

    .. math:: y = (x - \mu) / \sqrt{\sigma^2 + \epsilon} \; w + b

    It is made of ``aten.native_layer_norm``, so everything that torch does with that one works:
    gradients, compilation, export.

    Args:
        x: ``[..., *normalized_shape]``, floating point, any device.
        normalized_shape: the last dimensions of ``x``.
        weight, bias: of ``normalized_shape``.
        eps: is added to the variance, in its unit.

    Returns:
        ``y``, contiguous; mean and ``1 / sqrt(variance + eps)``, of ``x``'s shape with 1 for each
        normalized dimension.

    Raises:
        ValueError: ``normalized_shape`` is not the end of ``x``'s shape, or not that of ``weight``
            and ``bias``.
        TypeError: ``weight`` or ``bias`` is no tensor.

    Example:
        >>> x = torch.randn(4, 8)
        >>> y, mean, invstd = layer_norm(x, [8], torch.ones(8), torch.zeros(8))
        >>> mean.shape
        torch.Size([4, 1])
    """
    _check("layer_norm", x, normalized_shape, {"weight": weight, "bias": bias})
    return torch.ops.aten.native_layer_norm(x.contiguous(), normalized_shape, weight, bias, eps)


def layer_norm_backward(
    d_y: Tensor,
    x_mean: Tensor,
    x_invstd: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor,
    bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x``, weight and bias, from what :func:`layer_norm` took and gave.

    Raises:
        ValueError: a shape is not that of :func:`layer_norm`'s argument or result.
    """
    _check("layer_norm_backward", x, normalized_shape, {"weight": weight, "bias": bias})
    if d_y.shape != x.shape:
        raise ValueError(
            f"layer_norm_backward: d_y must have the shape {list(x.shape)} of x, got "
            f"{list(d_y.shape)}."
        )
    given = (d_y.contiguous(), x.contiguous(), normalized_shape, x_mean, x_invstd, weight, bias)
    return torch.ops.aten.native_layer_norm_backward(*given, [True, True, True])


def _check(
    name: str, x: Tensor, normalized_shape: Sequence[int], shared: dict[str, Tensor]
) -> None:
    shape = tuple(normalized_shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"{name}: normalized_shape must be the last dimensions of x {list(x.shape)}, got "
            f"{list(shape)}."
        )
    for argument, tensor in shared.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {argument} must be a tensor, got {type(tensor).__name__}.")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name}: {argument} must have the shape {list(shape)} of normalized_shape, got "
                f"{list(tensor.shape)}."
            )


_library.define(
    "layer_norm(Tensor x, SymInt[] normalized_shape, Tensor weight, Tensor bias, float eps=1e-5) "
    "-> (Tensor, Tensor, Tensor)"
)
_library.impl("layer_norm", layer_norm, "CompositeImplicitAutograd")
_library.define(
    "layer_norm_backward(Tensor d_y, Tensor x_mean, Tensor x_invstd, Tensor x, "
    "SymInt[] normalized_shape, Tensor weight, Tensor bias) -> (Tensor, Tensor, Tensor)"
)
_library.impl("layer_norm_backward", layer_norm_backward, "CompositeImplicitAutograd")
