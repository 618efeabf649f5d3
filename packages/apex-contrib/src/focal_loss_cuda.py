"""Apex's extension module of focal loss: its positional signatures over this wheel's ops.

Importable only where the kernels can run, because callers take the import as that answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex.contrib._ops import library
from apex.contrib.focal_loss import ops as _ops
from apex.contrib.focal_loss.focal_loss import check_operands as _check_operands

library.require_for_import(__name__, "focal_loss")

__all__ = ["backward", "forward"]


@torch.no_grad()
def forward(
    cls_output: Tensor,
    targets: Tensor,
    num_positives_sum: Tensor,
    num_real_classes: int,
    alpha: float,
    gamma: float,
    smoothing: float,
) -> list[Tensor]:
    """Return the loss, and its gradient times ``num_positives_sum``, in the dtype of the logits.

    Arguments and errors are those of :func:`apex.contrib.focal_loss.focal_loss.focal_loss`.
    """
    options = (num_real_classes, gamma, smoothing)
    _check_operands(cls_output, targets, num_positives_sum, *options)
    rows = cls_output.contiguous().reshape(-1, cls_output.shape[-1])
    given = (rows, targets.reshape(-1).contiguous())
    numbers = (int(num_real_classes), float(alpha), float(gamma), float(smoothing))
    losses = _ops.focal_loss_forward(*given, *numbers)
    gradient = _ops.focal_loss_backward(torch.ones_like(losses), *given, *numbers)
    return [losses.sum() / num_positives_sum, gradient.view(cls_output.shape)]


@torch.no_grad()
def backward(grad_output: Tensor, partial_grad: Tensor, num_positives_sum: Tensor) -> Tensor:
    """Multiply ``partial_grad`` by ``grad_output / num_positives_sum`` in place, and return it."""
    return partial_grad.mul_(grad_output / num_positives_sum)
