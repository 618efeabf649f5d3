"""Softmax of masked attention scores with dropout, whose random numbers any device repeats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._shared.native.formula import Formula
from .._shared.native.philox import uniform_rows
from . import mask_softmax_dropout as ops

__all__ = ["decompositions", "dropout_rows", "mask_softmax", "softmax_dropout"]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """In the dtype that it is computed in."""
    x = _wide(scores)
    if mask is not None:
        of_heads = mask.unsqueeze(1)
        is_added = mask.is_floating_point()
        x = x + of_heads if is_added else x.masked_fill(of_heads != 0, -torch.inf)
    return torch.softmax(x, -1)


def _dropped(x: Tensor, seed: Tensor, p: float, *corner: int) -> Tensor:
    scale = 1 / (1 - p) if p < 1 else 0.0
    return torch.where(uniform_rows(seed, x.shape, *corner) >= p, x * scale, 0)


def _mask_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    return _softmax(scores, mask).to(scores.dtype)


def _mask_softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    wide, dy = _wide(y), _wide(dy)
    return (wide * (dy - (wide * dy).sum(-1, keepdim=True))).to(y.dtype)


def _mask_softmax_dropout(
    scores: Tensor, mask: Tensor | None, seed: Tensor, p: float, *corner: int
) -> tuple[Tensor, Tensor]:
    y = _softmax(scores, mask)
    return _dropped(y, seed, p, *corner).to(scores.dtype), y.to(scores.dtype)


def _mask_softmax_dropout_backward(
    dy: Tensor, dsoftmax: Tensor | None, softmax: Tensor, keep: Tensor, p: float
) -> Tensor:
    scale = 1 / (1 - p) if p < 1 else 0.0
    passed = torch.where(keep != 0, _wide(dy) * scale, 0)
    if dsoftmax is not None:
        passed = passed + _wide(dsoftmax)
    return _mask_softmax_backward(passed, softmax)


def _seeded_dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    return _dropped(_wide(x), seed, p).to(x.dtype)


mask_softmax = Formula(
    "mask_softmax",
    ops.mask_softmax_forward,
    ops.mask_softmax_backward,
    _mask_softmax,
    saves=("y",),
    grads=("scores",),
    rows={"scores": 3, "mask": 2},
    plain_backward=_mask_softmax_backward,
)
"""Softmax of masked scores. Arguments: those of ``mask_softmax_forward``."""
# A batch of calls has random numbers of its own in each: it is not more rows of one call.
softmax_dropout = Formula(
    "mask_softmax_dropout",
    ops.mask_softmax_dropout_forward,
    ops.mask_softmax_dropout_backward,
    _mask_softmax_dropout,
    saves=("softmax", "dropped", "p"),
    grads=("scores",),
    rows={},
    outputs=2,  # or the second derivative would need the scores
    plain_backward=_mask_softmax_dropout_backward,
)
"""The same after dropout, and before. Arguments: those of ``mask_softmax_dropout_forward``."""
dropout_rows = Formula(
    "dropout_rows",
    ops.seeded_dropout,
    ops.seeded_dropout_backward,
    _seeded_dropout,
    saves=("seed", "p"),
    grads=("x",),
    rows={},
    plain_backward=_seeded_dropout,
)
"""Dropout alone. Arguments: those of ``seeded_dropout``."""


def decompositions() -> dict[Any, Any]:
    """All operators in ATen's, for ``ExportedProgram.run_decompositions``."""
    formulas = (mask_softmax, softmax_dropout, dropout_rows)
    return {op: f for formula in formulas for op, f in formula.decompositions().items()}
