"""Cross entropies with label smoothing: of logits, and of a head whose logits are never stored."""

from ..linear_cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy
from .softmax_xentropy import SoftmaxCrossEntropyLoss, decompositions

__all__ = [
    "LinearCrossEntropyLoss",
    "SoftmaxCrossEntropyLoss",
    "decompositions",
    "linear_cross_entropy",
]
