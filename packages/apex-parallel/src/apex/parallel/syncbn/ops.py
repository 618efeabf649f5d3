"""The operators of synchronised batch normalization: schemas, documentation and fake kernels.

They take contiguous tensors of shape ``[N, C, *]``, or ``[*, C]`` with ``channel_last``, in
float64, float32, float16 or bfloat16. "Statistics" are vectors ``[C]`` in float32, or float64 for
float64 input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import library
from .._shared.native.operands import statistics_dtype


def _statistics(input: Tensor, channel_last: bool) -> Tensor:
    channels = input.shape[-1] if channel_last else input.shape[1]
    return input.new_empty([channels], dtype=statistics_dtype(input.dtype))


@library.define("welford_mean_var(Tensor input, bool channel_last) -> (Tensor mean, Tensor var)")
def welford_mean_var(input: Tensor, channel_last: bool) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel; statistics. Both are 0 of an empty input.

    Source:
        Welford, *Note on a method for calculating corrected sums of squares and products*, 1962.
    """
    return _statistics(input, channel_last), _statistics(input, channel_last)


@library.define(
    "batch_statistics(Tensor input, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "Tensor(c!)? num_batches, float eps, float momentum, bool channel_last)"
    " -> (Tensor mean, Tensor var, Tensor inv_std, Tensor count)"
)
def batch_statistics(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches: Tensor | None,
    eps: float,
    momentum: float,
    channel_last: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All that a single rank needs of its batch, and the running statistics updated by it.

    Args:
        running_mean, running_var: statistics, each updated in place unless it is None:
            ``(1 - momentum) * running + momentum * new``, where ``new`` is ``mean`` or ``var``.
        num_batches: one int64 element or None, gets one more in place.
        eps: added to the biased variance, in units of the input squared.
        momentum: share of the batch in the running statistics.

    Returns:
        mean, var: of each channel, the variance unbiased; 0 of an empty input.
        inv_std: ``1 / sqrt(biased variance + eps)``.
        count: one int64 element, elements per channel.

    Source:
        Welford, *Note on a method for calculating corrected sums of squares and products*, 1962.
    """
    count = input.new_empty([1], dtype=torch.int64)
    return *(_statistics(input, channel_last) for _ in range(3)), count


@library.define(
    "welford_parallel(Tensor mean, Tensor biased_var, Tensor count, float eps)"
    " -> (Tensor mean, Tensor var, Tensor inv_std)"
)
def welford_parallel(
    mean: Tensor, biased_var: Tensor, count: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the statistics of W parts, such as ranks.

    Args:
        mean, biased_var: ``[W, C]`` float32 or float64.
        count: ``[W]`` int64, elements per channel of each part; 0 for an empty part.
        eps: added to the biased variance, in units of the input squared.

    Returns:
        mean: of all elements, ``[C]``.
        var: their unbiased variance, ``[C]``; 0 of a single element.
        inv_std: ``1 / sqrt(biased variance + eps)``, ``[C]``.

    Source:
        Chan, Golub & LeVeque, *Algorithms for computing the sample variance*, 1983.
    """
    channels = mean.shape[-1]
    return mean.new_empty([channels]), mean.new_empty([channels]), mean.new_empty([channels])


@library.define(
    "batchnorm_forward(Tensor input, Tensor? z, Tensor mean, Tensor inv_std, Tensor weight, "
    "Tensor bias, bool channel_last, bool fuse_relu) -> Tensor"
)
def batchnorm_forward(
    input: Tensor,
    z: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor,
    bias: Tensor,
    channel_last: bool,
    fuse_relu: bool,
) -> Tensor:
    """``(input - mean) * inv_std * weight + bias + z``, and with ``fuse_relu`` its positive part.

    Args:
        z: shape and dtype of ``input``, or None for 0.
        mean, inv_std, weight, bias: statistics.

    Returns:
        Shape and dtype of ``input``, rounded once.
    """
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@library.define(
    "relu_bw(Tensor grad_output, Tensor input, Tensor? z, Tensor mean, Tensor inv_std, "
    "Tensor weight, Tensor bias, bool channel_last) -> Tensor"
)
def relu_bw(
    grad_output: Tensor,
    input: Tensor,
    z: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor,
    bias: Tensor,
    channel_last: bool,
) -> Tensor:
    """``grad_output``, and 0 where :func:`batchnorm_forward` has cut off a value ``<= 0``."""
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@library.define(
    "reduce_bn(Tensor grad_output, Tensor input, Tensor mean, Tensor inv_std, bool channel_last)"
    " -> (Tensor sum_dy, Tensor sum_dy_xmu, Tensor weight_grad)"
)
def reduce_bn(
    grad_output: Tensor, input: Tensor, mean: Tensor, inv_std: Tensor, channel_last: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over each channel of ``grad_output`` and of ``grad_output * (input - mean)``.

    The first is the gradient of the bias, the second times ``inv_std`` that of the weight; all are
    statistics.
    """
    return tuple(_statistics(input, channel_last) for _ in range(3))


@library.define(
    "batchnorm_backward(Tensor grad_output, Tensor input, Tensor mean, Tensor inv_std, "
    "Tensor weight, Tensor sum_dy, Tensor sum_dy_xmu, Tensor count, bool channel_last) -> Tensor"
)
def batchnorm_backward(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
    channel_last: bool,
) -> Tensor:
    """Gradient of the input.

    ``(grad_output - sum_dy / n - (input - mean) * inv_std**2 * sum_dy_xmu / n) * weight * inv_std``

    Args:
        sum_dy, sum_dy_xmu: statistics, over all n elements of a channel wherever they are; zeros
            for constant ``mean`` and ``inv_std`` (eval mode).
        count: one int64 element, n.

    Source:
        Ioffe & Szegedy, *Batch Normalization*, 2015, section 3.
    """
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@library.define(
    "batchnorm_gradients(Tensor grad_output, Tensor input, Tensor mean, Tensor inv_std, "
    "Tensor weight, Tensor count, bool channel_last)"
    " -> (Tensor grad_input, Tensor sum_dy, Tensor weight_grad)"
)
def batchnorm_gradients(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor,
    count: Tensor,
    channel_last: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`batchnorm_backward` with the sums of :func:`reduce_bn`, of which it gives two."""
    of_input = torch.empty_like(input, memory_format=torch.contiguous_format)
    return of_input, *(_statistics(input, channel_last) for _ in range(2))
