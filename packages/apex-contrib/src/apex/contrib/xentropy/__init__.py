"""Cross entropy with label smoothing that reads the logits once in each direction."""

from .softmax_xentropy import SoftmaxCrossEntropyLoss

__all__ = ["SoftmaxCrossEntropyLoss"]
