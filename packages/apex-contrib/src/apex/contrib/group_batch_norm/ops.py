"""The operators of batch normalization over groups of ranks: schemas, meaning and fake kernels.

``x`` is contiguous ``[*, C]`` in float64, float32, float16 or bfloat16, and so are ``z``, ``y`` and
``dy``, in its dtype. "Statistics" are vectors ``[C]`` in float32, or float64 for float64 input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import library
from .._shared.native.operands import statistics_dtype

_Vectors = tuple[Tensor, Tensor]


def _statistics(x: Tensor) -> Tensor:
    return x.new_empty([x.shape[-1]], dtype=statistics_dtype(x.dtype))


@library.define("group_batch_norm_moments(Tensor x) -> (Tensor mean, Tensor biased_var)")
def moments(x: Tensor) -> _Vectors:
    """Mean and biased variance of each channel; statistics. Both are 0 of an empty input."""
    return _statistics(x), _statistics(x)


@library.define(
    "group_batch_norm_statistics(Tensor x, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "Tensor(c!)? num_batches, float eps, float momentum)"
    " -> (Tensor mean, Tensor var, Tensor inv_std, Tensor count)"
)
def statistics(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches: Tensor | None,
    eps: float,
    momentum: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All that a single rank needs of its rows, and the running statistics updated by it.

    Mean, unbiased variance, ``1 / sqrt(biased_var + eps)``, and the int64 ``[1]`` number of rows.
    Running ones that are not None become ``(1 - momentum) * running + momentum * new`` in place,
    and ``num_batches``, one int64 element or None, gets one more.

    Source:
        Ioffe & Szegedy, *Batch Normalization*, 2015, algorithm 1.
    """
    return *(_statistics(x) for _ in range(3)), x.new_empty([1], dtype=torch.int64)


@library.define(
    "group_batch_norm_merge(Tensor mean, Tensor biased_var, Tensor count, float eps)"
    " -> (Tensor mean, Tensor var, Tensor inv_std)"
)
def merge(
    mean: Tensor, biased_var: Tensor, count: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of W parts as one: mean, unbiased variance and ``1 / sqrt(biased_var + eps)``.

    ``mean`` and ``biased_var`` are ``[W, C]``; ``count`` is int64 ``[W]``, rows of each part.

    Source:
        Chan, Golub & LeVeque, *Algorithms for computing the sample variance*, 1983.
    """
    return _statistics(mean), _statistics(mean), _statistics(mean)


@library.define(
    "group_batch_norm_forward(Tensor x, Tensor? z, Tensor mean, Tensor inv_std, Tensor weight, "
    "Tensor bias, bool relu) -> Tensor"
)
def forward(
    x: Tensor,
    z: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor,
    bias: Tensor,
    relu: bool,
) -> Tensor:
    """``(x - mean) * inv_std * weight + bias + z``, and with ``relu`` its positive part.

    All vectors are statistics; the result is like ``x``, rounded once.
    """
    return torch.empty_like(x)


@library.define(
    "group_batch_norm_sums(Tensor dy, Tensor x, Tensor? y, Tensor mean, Tensor inv_std)"
    " -> (Tensor masked, Tensor sum_dy, Tensor sum_dy_xmu, Tensor weight_grad)"
)
def sums(
    dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, inv_std: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dy``, or 0 where ``y <= 0``; and its sums over rows, alone and times ``x - mean``.

    Without ``y`` nothing is masked, and ``masked`` is ``[0]``. The first sum is the bias' gradient,
    the second times ``inv_std`` that of the weight; all are statistics.
    """
    masked = x.new_empty([0]) if y is None else torch.empty_like(x)
    return masked, *(_statistics(x) for _ in range(3))


@library.define(
    "group_batch_norm_backward(Tensor dy, Tensor x, Tensor mean, Tensor inv_std, Tensor weight, "
    "Tensor sum_dy, Tensor sum_dy_xmu, Tensor count) -> Tensor"
)
def backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """Gradient of ``x``, given sums over all ``count`` (int64, one element) rows of all ranks.

    ``(dy - sum_dy / n - (x - mean) * inv_std**2 * sum_dy_xmu / n) * weight * inv_std``; sums of
    zeros stand for constant statistics.

    Source:
        Ioffe & Szegedy, *Batch Normalization*, 2015, section 3.
    """
    return torch.empty_like(x)


@library.define(
    "group_batch_norm_gradients(Tensor dy, Tensor x, Tensor? y, Tensor mean, Tensor inv_std, "
    "Tensor weight, Tensor count)"
    " -> (Tensor masked, Tensor dx, Tensor sum_dy, Tensor weight_grad)"
)
def gradients(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor,
    count: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`backward` of what :func:`sums` has masked, with its sums, of which it gives two."""
    masked = x.new_empty([0]) if y is None else torch.empty_like(x)
    return masked, torch.empty_like(x), *(_statistics(x) for _ in range(2))
