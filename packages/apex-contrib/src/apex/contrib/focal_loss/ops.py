"""The focal_loss operators: schemas, documentation and fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import library


@library.define(
    "focal_loss_forward(Tensor x, Tensor targets, int classes, float alpha, float gamma, "
    "float smoothing) -> Tensor losses"
)
def focal_loss_forward(
    x: Tensor, targets: Tensor, classes: int, alpha: float, gamma: float, smoothing: float
) -> Tensor:
    """Focal loss, summed over each row: ``[N, C]`` and int64 ``[N]`` to ``[N]``.

    float32, or float64 for float64. Targets are classes, or -2: the row has loss 0 and is not
    read; any other negative number: no class is positive. Columns from ``classes`` are not read.
    A target that is no class raises RuntimeError on a CPU; on a GPU its row becomes NaN.
    """
    return x.new_empty(x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))


@library.define(
    "focal_loss_backward(Tensor grad_losses, Tensor x, Tensor targets, int classes, float alpha, "
    "float gamma, float smoothing) -> Tensor"
)
def focal_loss_backward(
    grad_losses: Tensor,
    x: Tensor,
    targets: Tensor,
    classes: int,
    alpha: float,
    gamma: float,
    smoothing: float,
) -> Tensor:
    """Gradient of :func:`focal_loss_forward` with respect to ``x``; 0 where that reads nothing."""
    return torch.empty_like(x)
