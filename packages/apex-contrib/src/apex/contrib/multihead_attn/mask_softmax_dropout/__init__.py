"""The operators of softmax of masked scores with dropout: schemas, documentation, fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._ops import library


@library.define("mask_softmax_forward(Tensor scores, Tensor? mask) -> Tensor y")
def mask_softmax_forward(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over the last dimension of contiguous scores ``[b, heads, sq, sk]``; like them.

    ``mask`` is ``[b, 1, sk]`` or ``[b, sq, sk]``, contiguous but for its first dimension: bool or
    uint8, which hides a key where it is not 0, or numbers to add, float32 (float64 for float64).
    A row whose scores are all hidden is NaN, as that of ``torch.softmax``.
    """
    return torch.empty_like(scores)


@library.define("mask_softmax_backward(Tensor dy, Tensor y) -> Tensor")
def mask_softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    """``y * (dy - sum(y * dy))``, like y; ``dy`` has any layout."""
    return torch.empty_like(y)


@library.define(
    "mask_softmax_dropout_forward(Tensor scores, Tensor? mask, Tensor seed, float p, "
    "int first=0, int rows=0, int columns=0) -> (Tensor dropped, Tensor softmax)"
)
def mask_softmax_dropout_forward(
    scores: Tensor,
    mask: Tensor | None,
    seed: Tensor,
    p: float,
    first: int = 0,
    rows: int = 0,
    columns: int = 0,
) -> tuple[Tensor, Tensor]:
    """:func:`mask_softmax_forward`, and the same with dropout: 0, or divided by ``1 - p``.

    An element is kept where its random number is at least ``p``, in [0, 1]. The numbers depend on
    ``seed``, one int64, and on the element's index; see ``uniform_rows``. With ``rows`` and
    ``columns``, scores get the numbers of the corners of larger matrices ``[rows, columns]``, of
    which ``first`` come before: a sequence alone then has those that it has in a padded batch.
    """
    return torch.empty_like(scores), torch.empty_like(scores)


@library.define(
    "mask_softmax_dropout_backward(Tensor dy, Tensor? dsoftmax, Tensor softmax, Tensor keep, "
    "float p) -> Tensor"
)
def mask_softmax_dropout_backward(
    dy: Tensor, dsoftmax: Tensor | None, softmax: Tensor, keep: Tensor, p: float
) -> Tensor:
    """Gradient of the scores, like softmax, from those of both results, of any layout.

    ``keep`` is not 0 where something was kept: bool, uint8, or ``dropped`` itself.
    """
    return torch.empty_like(softmax)


@library.define("seeded_dropout(Tensor x, Tensor seed, float p) -> Tensor")
def seeded_dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """Dropout of contiguous rows, with the numbers of :func:`mask_softmax_dropout_forward`."""
    return torch.empty_like(x)


@library.define("seeded_dropout_backward(Tensor dy, Tensor seed, float p) -> Tensor")
def seeded_dropout_backward(dy: Tensor, seed: Tensor, p: float) -> Tensor:
    """The same of a gradient of any layout; contiguous."""
    return torch.empty_like(dy, memory_format=torch.contiguous_format)
