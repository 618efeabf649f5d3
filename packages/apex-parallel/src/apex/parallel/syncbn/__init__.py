"""Kernels of synchronised batch normalization: statistics, normalization, and their gradients."""

from .ops import (
    batchnorm_backward,
    batchnorm_forward,
    reduce_bn,
    relu_bw,
    statistics_dtype,
    welford_mean_var,
    welford_parallel,
)

__all__ = [
    "batchnorm_backward",
    "batchnorm_forward",
    "reduce_bn",
    "relu_bw",
    "statistics_dtype",
    "welford_mean_var",
    "welford_parallel",
]
