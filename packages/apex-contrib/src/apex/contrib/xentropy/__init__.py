"""Cross entropy with label smoothing that reads the logits once in each direction."""

from .softmax_xentropy import SoftmaxCrossEntropyLoss, decompositions

__all__ = ["SoftmaxCrossEntropyLoss", "decompositions"]
