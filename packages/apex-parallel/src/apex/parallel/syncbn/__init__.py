"""Kernels of synchronised batch normalization: statistics, normalization, and their gradients."""

from .ops import (
    batch_statistics,
    batchnorm_backward,
    batchnorm_forward,
    reduce_bn,
    relu_bw,
    statistics_dtype,
    welford_mean_var,
    welford_parallel,
)

__all__ = [
    "batch_statistics",
    "batchnorm_backward",
    "batchnorm_forward",
    "reduce_bn",
    "relu_bw",
    "statistics_dtype",
    "welford_mean_var",
    "welford_parallel",
]
