"""Batch norm with frozen statistics: a scale and a bias for each channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["FrozenBatchNorm2d", "compute_scale_bias_method", "compute_scale_bias_one"]


def _scale_bias(
    weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor
) -> tuple[Tensor, Tensor]:
    # A channel without variance was constant: what batch norm makes of it is the bias.
    inverse = torch.where(running_var > 0, running_var.rsqrt(), 0.0)
    scale = weight * inverse
    return scale, bias - running_mean * scale


def _shaped(nhwc: bool, vector: Tensor) -> Tensor:
    return vector.view(1, 1, 1, -1) if nhwc else vector.view(1, -1, 1, 1)


class FrozenBatchNorm2d(nn.Module):
    """``x * scale + shift``, where ``scale = weight / sqrt(running_var)``.

    ``shift`` is ``bias - running_mean * scale``; there is no epsilon, as in Apex. A channel whose
    variance is 0 has scale 0.

    Args:
        n: number of channels C.

    Attributes:
        weight, bias, running_mean, running_var: buffers ``[C]``, of ones, zeros, zeros and ones.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(n))
        self.register_buffer("bias", torch.zeros(n))
        self.register_buffer("running_mean", torch.zeros(n))
        self.register_buffer("running_var", torch.ones(n))

    def get_scale_bias(self, nhwc: bool) -> tuple[Tensor, Tensor]:
        """Scale and shift, ``[1, 1, 1, C]`` for ``nhwc``, else ``[1, C, 1, 1]``."""
        scale, bias = _scale_bias(self.weight, self.bias, self.running_mean, self.running_var)
        return _shaped(nhwc, scale), _shaped(nhwc, bias)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: ``[N, C, H, W]``."""
        scale, bias = self.get_scale_bias(False)
        return x * scale + bias


def compute_scale_bias_one(
    nhwc: bool,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    w_scale: Tensor,
    w_bias: Tensor,
) -> None:
    """Write scale and shift of a frozen batch norm to ``w_scale`` and ``w_bias``."""
    scale, shift = _scale_bias(weight, bias, running_mean, running_var)
    w_scale.copy_(_shaped(nhwc, scale))
    w_bias.copy_(_shaped(nhwc, shift))


def compute_scale_bias_method(nhwc: bool, args: Sequence[tuple[Tensor, ...]]) -> None:
    """:func:`compute_scale_bias_one` of each tuple of its arguments but the first."""
    for arg in args:
        compute_scale_bias_one(nhwc, *arg)
