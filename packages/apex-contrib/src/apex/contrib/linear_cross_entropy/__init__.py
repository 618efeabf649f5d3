"""A head and its cross entropy in chunks; users import it from ``apex.contrib.xentropy``."""

from .loss import LinearCrossEntropyLoss, linear_cross_entropy

__all__ = ["LinearCrossEntropyLoss", "linear_cross_entropy"]
