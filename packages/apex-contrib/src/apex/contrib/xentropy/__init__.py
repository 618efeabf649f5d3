"""Cross entropies with label smoothing: of logits, and of a head whose logits are never stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .softmax_xentropy import SoftmaxCrossEntropyLoss, decompositions

if TYPE_CHECKING:
    from ..linear_cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy

__all__ = [
    "LinearCrossEntropyLoss",
    "SoftmaxCrossEntropyLoss",
    "decompositions",
    "linear_cross_entropy",
]


def __getattr__(name: str) -> Any:
    """Import the loss of a head when it is asked for: Apex has no such name."""
    if name not in ("LinearCrossEntropyLoss", "linear_cross_entropy"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .. import linear_cross_entropy as head

    return getattr(head, name)
