"""group_norm_nhwc as a Formula: kernels, and the same in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._shared.native.formula import Formula
from ..._shared.native.operands import statistics_dtype
from . import ops


def _reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    groups: int = 1,
    eps: float = 0.0,
    silu: bool = False,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = statistics_dtype(x.dtype)
    values = x.to(wide).unflatten(1, (groups, -1)).flatten(2)  # [N, groups, elements]
    mean = values.mean(-1, keepdim=True)
    deviation = values - mean
    rstd = torch.rsqrt(deviation.square().mean(-1, keepdim=True) + eps)
    y = (deviation * rstd).reshape(x.shape).movedim(1, -1)
    if weight is not None:
        y = y * (1 + weight.to(wide) if zero_centered_gamma else weight.to(wide))
    y = y if bias is None else y + bias.to(wide)
    y = F.silu(y) if silu else y
    return y.movedim(-1, 1).to(x.dtype), mean.reshape(-1), rstd.reshape(-1)


group_norm_nhwc = Formula(
    "GroupNorm",
    ops.group_norm_nhwc_forward,
    ops.group_norm_nhwc_backward,
    _reference,
    saves=(
        *("x", "weight", "bias", "mean", "rstd", "groups", "eps", "silu"),
        "zero_centered_gamma",
    ),
    grads=("x", "weight", "bias"),
    rows={"x": -1},
    shared=("weight", "bias"),
)
