"""Batch normalization of channels-last tensors with ReLU and residual, over groups of ranks."""

from .batch_norm import BatchNorm2d_NHWC

__all__ = ["BatchNorm2d_NHWC"]
