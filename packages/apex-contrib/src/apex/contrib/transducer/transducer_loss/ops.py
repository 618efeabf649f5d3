"""The transducer_loss operators: schemas, documentation and fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._ops import library


@library.define(
    "transducer_loss_forward(Tensor x, Tensor label, Tensor f_len, Tensor y_len, "
    "Tensor? batch_offset, int blank, int max_f_len, bool softmax) -> (Tensor loss, Tensor maxima, "
    "Tensor sums_exp, Tensor scores, Tensor alpha, Tensor beta)"
)
def transducer_loss_forward(
    x: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    batch_offset: Tensor | None,
    blank: int,
    max_f_len: int,
    softmax: bool,
) -> tuple[Tensor, ...]:
    """Loss of every sample, and what the backward needs.

    Args:
        x: logits ``[B, T, U, V]``, contiguous; packed, with ``batch_offset``, ``[rows, V]``.
        label: ``[B, U - 1]`` int64; f_len, y_len, batch_offset: ``[B]`` int64.
        blank: the class of the blank. max_f_len: ``T`` of packed ``x``; else not used.
        softmax: ``x`` are logits; else logarithms of probabilities.

    Returns:
        loss: ``[B]``; maxima, sums_exp: of the shape of ``x`` without ``V``; scores: with 2 behind
        it, log-probabilities of the blank and of the next label; all of these float32, or float64
        for float64. alpha, beta: shaped as maxima, float64, because a gradient is the exponential
        of their difference. Cells outside of a sample's lengths have 0 (sums_exp: 1).

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, or on a CPU lengths and labels. On a GPU
            such a sample's loss is NaN, and nothing is read out of bounds.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    cells = x.shape[:-1]
    shapes = [label.shape[:1], cells, cells, (*cells, 2), cells, cells]
    dtypes = [wide] * 4 + [torch.float64] * 2
    return tuple(x.new_empty(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True))


@library.define(
    "transducer_loss_backward(Tensor grad_loss, Tensor x, Tensor maxima, Tensor sums_exp, "
    "Tensor scores, Tensor alpha, Tensor beta, Tensor label, Tensor f_len, Tensor y_len, "
    "Tensor? batch_offset, int blank, int max_f_len, bool softmax) -> Tensor"
)
def transducer_loss_backward(
    grad_loss: Tensor,
    x: Tensor,
    maxima: Tensor,
    sums_exp: Tensor,
    scores: Tensor,
    alpha: Tensor,
    beta: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    batch_offset: Tensor | None,
    blank: int,
    max_f_len: int,
    softmax: bool,
) -> Tensor:
    """Gradient of :data:`transducer_loss_forward` with respect to ``x``; 0 outside of lengths."""
    return torch.empty_like(x)
