"""What a bottleneck computes, of images [N, C, H, W]: three or four convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .._shared.native.composed import plainly
from .._shared.native.half_matmul import is_slow
from .._shared.native.operands import autocast
from ..group_batch_norm.over_group import frozen

__all__ = ["Padder", "block"]

Padder = Callable[[Tensor], Tensor]
"""Puts the neighbours' rows around an image: (image) -> image with a row more on each side."""


def _frozen(x: Tensor, scale: Tensor, bias: Tensor, z: Tensor | None, relu: bool) -> Tensor:
    """In one pass, of the channels_last memory format."""
    rows = [t if t is None else t.movedim(1, -1).contiguous() for t in (x, z)]
    return frozen(*rows, scale.flatten(), bias.flatten(), relu).movedim(-1, 1)


def _plain(x: Tensor, scale: Tensor, bias: Tensor, z: Tensor | None, relu: bool) -> Tensor:
    y = x * scale.view(-1, 1, 1) + bias.view(-1, 1, 1)
    y = y if z is None else y + z
    return y.relu() if relu else y


def _run(
    stride: int,
    scales: Sequence[Tensor],
    biases: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    padder: Padder | None,
    fused: bool,
) -> Tensor:
    follow = _frozen if fused else _plain
    layer = lambda i, x, padding, stride, z, relu: follow(
        F.conv2d(x, weights[i], None, stride, padding), scales[i], biases[i], z, relu
    )
    out = layer(0, x, 0, stride, None, True)
    out = (
        layer(1, out, 1, 1, None, True)
        if padder is None
        else layer(1, padder(out), (0, 1), 1, None, True)
    )
    identity = layer(3, x, 0, stride, None, False) if len(weights) > 3 else x
    return layer(2, out, 0, 1, identity, True)


def block(
    stride: int,
    scales: Sequence[Tensor],
    biases: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    padder: Padder | None = None,
    fused: bool = True,
) -> Tensor:
    """``relu(bn3(conv3(relu(bn2(conv2(relu(bn1(conv1(x)))))))) + identity)``.

    Args:
        stride: of the first convolution, and of that of the identity.
        scales, biases: of frozen batch norms, constants of C elements each: three, or four.
        x: ``[N, C, H, W]``.
        weights: 1x1, 3x3, 1x1, and 1x1 of the identity if there is one; ``[K, C, R, S]``.
        padder: the second convolution's image is divided over ranks by rows: puts a neighbour's
            row, or zeros, on each side.
        fused: scale, bias, ReLU and residual in one pass each; else plain PyTorch.

    Under autocast tensors are cast to its dtype first. A 16-bit dtype is computed in float32 where
    a CPU has no arithmetic of it, and rounded once.
    """
    x, *weights = autocast(x, *weights)
    if not fused:
        return _run(stride, scales, biases, x, weights, padder, False)
    dtype, x = x.dtype, x.contiguous(memory_format=torch.channels_last)
    if is_slow(x):
        x, weights = x.float(), [weight.float() for weight in weights]
    return plainly(x, _run, stride, scales, biases, x, weights, padder, True).to(dtype)
