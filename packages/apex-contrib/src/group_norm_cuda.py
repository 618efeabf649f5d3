"""Apex's extension module of group normalization: its positional signatures over this wheel's ops.

Importable only where the kernels can run, because callers take the import as that answer. Tensors
are ``[N, H, W, C]``, or ``[N, C, H, W]`` that are channels-last in memory; results are like them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex.contrib._ops import library
from apex.contrib.group_norm.custom_ops import group_norm_nhwc_bprop, group_norm_nhwc_fprop
from apex.contrib.group_norm.functional import channels_second

library.require_for_import(__name__, "group_norm_nhwc")

__all__ = ["backward", "forward"]


@torch.no_grad()
def forward(
    input: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    passes: int,
    with_swish: bool = False,
) -> list[Tensor]:
    """Return the output, and all means and reciprocal standard deviations ``[2 * N * groups]``.

    Arguments and errors are those of
    :func:`~apex.contrib.group_norm.group_norm.group_norm_nhwc_fprop`.
    """
    x, back = channels_second(input, weight)
    act = "silu" if with_swish else None
    y, sums = group_norm_nhwc_fprop(x, groups, weight, bias, eps, act, passes)
    return [back(y), sums]


@torch.no_grad()
def backward(
    grad_output: Tensor,
    sums: Tensor,
    input: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    passes: int,
    with_swish: bool = False,
) -> list[Tensor]:
    """Return the gradients of input, weight and bias."""
    x, back = channels_second(input, weight)
    dy, _ = channels_second(grad_output, weight)
    act = "silu" if with_swish else None
    dx, dweight, dbias = group_norm_nhwc_bprop(dy, sums, x, groups, weight, bias, eps, act, passes)
    return [back(dx), dweight, dbias]
