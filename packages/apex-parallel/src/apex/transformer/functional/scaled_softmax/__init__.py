"""Softmax of scaled attention scores: of all, of those up to the diagonal, of those not masked."""

from __future__ import annotations

import torch
from torch import Tensor

from ....parallel._ops import library
from ....parallel._shared.native.formula import Formula

__all__ = ["causal_softmax", "decompositions", "masked_softmax", "scaled_softmax"]

MASKED_SCORE = -10000.0  # what a masked score counts as


@library.define("scaled_softmax_forward(Tensor x, float scale) -> Tensor y")
def scaled_softmax_forward(x: Tensor, scale: float) -> Tensor:
    """``softmax(scale * x)`` over the last dimension of contiguous ``[..., columns]``; like x."""
    return torch.empty_like(x)


@library.define("scaled_softmax_backward(Tensor dy, Tensor y, float scale) -> Tensor dx")
def scaled_softmax_backward(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """``scale * y * (dy - sum(y * dy))``, like y; ``dy`` has any layout. Also of masked scores."""
    return torch.empty_like(y)


@library.define("causal_softmax_forward(Tensor x, float scale) -> Tensor y")
def causal_softmax_forward(x: Tensor, scale: float) -> Tensor:
    """:func:`scaled_softmax_forward` of ``[..., s, s]``; row i sees columns 0 to i."""
    return torch.empty_like(x)


@library.define("causal_softmax_backward(Tensor dy, Tensor y, float scale) -> Tensor dx")
def causal_softmax_backward(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """Gradient of :func:`causal_softmax_forward`, which is 0 above the diagonal."""
    return torch.empty_like(y)


@library.define("masked_softmax_forward(Tensor x, Tensor mask, float scale) -> Tensor y")
def masked_softmax_forward(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """:func:`scaled_softmax_forward` of ``[b, heads, sq, sk]`` with -10000 where ``mask`` is true.

    ``mask`` is bool or uint8, ``[b, 1, sq, sk]``, contiguous but for its first dimension. Rows that
    are masked altogether are 0.
    """
    return torch.empty_like(x)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _softmax(x: Tensor, scale: float) -> Tensor:
    return torch.softmax(scale * _wide(x), -1).to(x.dtype)


def _softmax_backward(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    wide, wide_dy = _wide(y), _wide(dy)
    return (scale * wide * (wide_dy - (wide * wide_dy).sum(-1, keepdim=True))).to(y.dtype)


def _above_diagonal(x: Tensor) -> Tensor:
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)


def _causal_softmax(x: Tensor, scale: float) -> Tensor:
    scores = (scale * _wide(x)).masked_fill(_above_diagonal(x), -torch.inf)
    return torch.softmax(scores, -1).to(x.dtype)


def _causal_softmax_backward(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    # What comes above the diagonal may be anything, also inf.
    return _softmax_backward(dy.masked_fill(_above_diagonal(y), 0), y, scale)


def _masked_softmax(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    hidden = mask != 0
    y = torch.softmax((scale * _wide(x)).masked_fill(hidden, MASKED_SCORE), -1)
    return y.masked_fill(hidden.all(-1, keepdim=True), 0).to(x.dtype)


_FORMULAS = {
    "scaled_softmax": Formula(
        "scaled_softmax",
        scaled_softmax_forward,
        scaled_softmax_backward,
        _softmax,
        saves=("y", "scale"),
        grads=("x",),
        rows={"x": 1},
        plain_backward=_softmax_backward,
    ),
    "causal_softmax": Formula(
        "scaled_upper_triang_masked_softmax",
        causal_softmax_forward,
        causal_softmax_backward,
        _causal_softmax,
        saves=("y", "scale"),
        grads=("x",),
        rows={"x": 2},
        plain_backward=_causal_softmax_backward,
    ),
    "masked_softmax": Formula(
        "scaled_masked_softmax",
        masked_softmax_forward,
        scaled_softmax_backward,
        _masked_softmax,
        saves=("y", "scale"),
        grads=("x",),
        rows={"x": 3, "mask": 3},
        plain_backward=_softmax_backward,
    ),
}
scaled_softmax = _FORMULAS["scaled_softmax"]
"""``softmax(scale * x)`` of rows, with float32 arithmetic. Arguments: those of
``scaled_softmax_forward``."""
causal_softmax = _FORMULAS["causal_softmax"]
"""The same of ``[*, queries, keys]``, where a query sees no later key."""
masked_softmax = _FORMULAS["masked_softmax"]
"""The same, where the keys that a mask marks get no weight."""


def decompositions() -> dict:
    """All operators in ATen's, for ``ExportedProgram.run_decompositions``."""
    return {op: f for formula in _FORMULAS.values() for op, f in formula.decompositions().items()}
