"""The operators of linear_cross_entropy: schemas, documentation and fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import library


@library.define(
    "logit_statistics(Tensor(a!) logits, Tensor labels, int first, int classes, int padding_idx, "
    "float softcap) -> (Tensor maxima, Tensor sums_exp, Tensor targets, Tensor means)"
)
def logit_statistics(
    logits: Tensor, labels: Tensor, first: int, classes: int, padding_idx: int, softcap: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the loss and the gradient of a chunk of logits need of each row.

    Args:
        logits: ``[N, C]`` contiguous, float64, float32, float16 or bfloat16: this rank's classes,
            ``first`` to ``first + C``. With ``softcap`` each becomes ``cap * tanh(x / cap)``.
        labels: ``[N]`` int64, each in ``[0, classes)`` or ``padding_idx``; any other is an error on
            the CPU, and gives a target of NaN on a GPU.
        first, classes: this rank's first class, and how many all ranks have.
        padding_idx: rows with this label are not read.
        softcap: 0 for none.

    Returns:
        maxima, sums_exp: ``[N]`` float32, or float64 for float64 logits: the largest logit, and
            ``sum(exp(logits - max))``, two numbers, which keep the digits of their logarithm's sum.
        targets: the label's logit; 0 where it is another rank's.
        means: ``sum(logits) / classes``.

    Raises:
        RuntimeError: shapes, dtypes, devices or numbers do not fit, or a label is no class (CPU).
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    return tuple(logits.new_empty(logits.shape[0], dtype=wide) for _ in range(4))


@library.define(
    "logit_gradients(Tensor(a!) logits, Tensor labels, Tensor maxima, Tensor sums_exp, "
    "Tensor targets, Tensor grad_losses, int first, int classes, int padding_idx, "
    "float smoothing, float z_loss, float softcap) -> ()"
)
def logit_gradients(
    logits: Tensor,
    labels: Tensor,
    maxima: Tensor,
    sums_exp: Tensor,
    targets: Tensor,
    grad_losses: Tensor,
    first: int,
    classes: int,
    padding_idx: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
) -> None:
    """Write the gradient of a chunk of logits in their place.

    .. math::
        d\\mathrm{loss} \\, \\left( (1 + 2 z \\, \\mathrm{lse}) \\, e^{x_c - \\mathrm{lse}} - s / C
        - (1 - s) [c = \\mathrm{label}] \\right) (1 - (x_c / \\mathrm{cap})^2)

    Args:
        logits: as :data:`logit_statistics` left them.
        labels, first, classes, padding_idx, softcap: as of :data:`logit_statistics`.
        maxima, sums_exp, targets: its results; of several ranks the largest, and sums.
        grad_losses: ``[N]``, of the dtype of ``maxima``.
        smoothing, z_loss: ``s`` in ``[0, 1]``, and ``z``.

    Raises:
        RuntimeError: as of :data:`logit_statistics`.
    """
