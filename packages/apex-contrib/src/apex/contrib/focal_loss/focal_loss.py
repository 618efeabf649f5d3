"""Focal loss of dense detectors, with label smoothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._shared.native.formula import Formula
from .._shared.native.named_functions import NamedFunction
from .._shared.native.operands import check_floating, exact
from . import ops

__all__ = ["FocalLoss", "decompositions", "focal_loss"]

_IGNORED = -2


def _reference(
    x: Tensor, targets: Tensor, classes: int, alpha: float, gamma: float, smoothing: float
) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    columns = torch.arange(x.shape[1], device=x.device)
    is_read = (targets != _IGNORED)[:, None] & (columns < classes)
    x = torch.where(is_read, x, 0)
    is_positive = columns == targets[:, None]
    z = torch.where(is_positive, x, -x)
    bce = smoothing / 2 * z - F.logsigmoid(z)
    weight = torch.where(is_positive, alpha, torch.full_like(z, 1 - alpha))
    losses = weight * torch.exp(gamma * F.logsigmoid(-z)) * bce
    return torch.where(is_read, losses, 0).sum(-1)


_focal = Formula(
    "focal_loss",
    ops.focal_loss_forward,
    ops.focal_loss_backward,
    _reference,
    saves=("x", "targets", "classes", "alpha", "gamma", "smoothing"),
    grads=("x",),
    rows={"x": 1, "targets": 0},
)
decompositions = _focal.decompositions
"""The operators in ATen's, for ``ExportedProgram.run_decompositions``: call it."""


def focal_loss(
    cls_output: Tensor,
    cls_targets_at_level: Tensor,
    num_positive_sum: Tensor,
    num_real_classes: int,
    alpha: float,
    gamma: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Focal loss of all anchors and classes, divided by the number of positive anchors.

    .. math:: \frac{1}{P} \sum a_t (1 - p_t)^\gamma \, \mathrm{BCE}(x, t)

    with :math:`p_t = \sigma(x), a_t = \alpha` for the class of an anchor, and
    :math:`p_t = 1 - \sigma(x), a_t = 1 - \alpha` for the others.

    Args:
        cls_output: logits ``[..., C]``; float64, float32, float16 or bfloat16; any layout.
        cls_targets_at_level: ``[...]`` int64: the class of each anchor; -2 leaves it out; any other
            negative number says that no class is right (background).
        num_positive_sum: :math:`P`, a number, or a tensor of one on the device of ``cls_output``.
        num_real_classes: columns from here on are padding, without loss and gradient.
        alpha: weight of the right class; the others have ``1 - alpha``.
        gamma: 0 or more; how much less what is classified well counts.
        label_smoothing: ``s``, in ``[0, 1]``: targets of the BCE are ``1 - s / 2`` and ``s / 2``.

    Returns:
        A float32 number, float64 for float64. Derivatives of any order work.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: shapes, devices or numbers do not fit.
        RuntimeError: a target is not below ``num_real_classes``; on a CPU. On a GPU, where the
            check would wait for the device, loss and that row's gradient are NaN.

    Source:
        Lin et al. 2017, "Focal loss for dense object detection", https://arxiv.org/abs/1708.02002;
        the smoothing of both classes is Apex's.

    Example:
        >>> logits, targets = torch.randn(2, 100, 80), torch.randint(-2, 80, (2, 100))
        >>> positives = (targets >= 0).sum().float()
        >>> focal_loss(logits, targets, positives, 80, alpha=0.25, gamma=2.0).shape
        torch.Size([])
    """
    x, targets = cls_output, cls_targets_at_level
    check_operands(x, targets, num_positive_sum, num_real_classes, gamma, label_smoothing)
    numbers = (int(num_real_classes), float(alpha), float(gamma), float(label_smoothing))
    if x.dim() != 2:
        x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    return _focal(exact(x), exact(targets), *numbers).sum() / num_positive_sum


class FocalLoss(NamedFunction, constants=("num_positives_sum",)):
    """Apex's class of :func:`focal_loss`; ``apply`` takes the same arguments."""

    @staticmethod
    def apply(
        cls_output: Tensor,
        cls_targets_at_level: Tensor,
        num_positives_sum: Tensor | float,
        num_real_classes: int,
        alpha: float,
        gamma: float,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        given = cls_output, cls_targets_at_level, num_positives_sum, num_real_classes
        return focal_loss(*given, alpha, gamma, label_smoothing)


def check_operands(
    x: Tensor, targets: Tensor, positives: Any, classes: int, gamma: float, smoothing: float
) -> None:
    """Raise TypeError or ValueError for what the kernels do not take; not for targets."""
    name = "focal_loss"
    check_floating(name, "cls_output", x)
    if not isinstance(targets, Tensor) or targets.dtype != torch.int64:
        got = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise TypeError(
            f"{name}: cls_targets_at_level must be an int64 tensor, got {got}; use .long()."
        )
    if x.dim() < 1 or targets.shape != x.shape[:-1]:
        raise ValueError(
            f"{name}: cls_targets_at_level must have shape {list(x.shape[:-1])}, one number for "
            f"each row of cls_output {list(x.shape)}, got {list(targets.shape)}."
        )
    if isinstance(positives, Tensor) and positives.numel() != 1:
        raise ValueError(
            f"{name}: num_positive_sum must be one number, got {list(positives.shape)}."
        )
    if not 0 <= classes <= x.shape[-1]:
        raise ValueError(
            f"{name}: num_real_classes must be 0 to {x.shape[-1]}, the columns of cls_output "
            f"{list(x.shape)}, got {classes}."
        )
    if not gamma >= 0:
        raise ValueError(f"{name}: gamma must not be negative, got {gamma}.")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing must be in [0, 1], got {smoothing}.")
    for argument, tensor in (("cls_targets_at_level", targets), ("num_positive_sum", positives)):
        if isinstance(tensor, Tensor) and tensor.device != x.device:
            raise ValueError(
                f"{name}: {argument} is on {tensor.device}, but cls_output on {x.device}; move one."
            )
