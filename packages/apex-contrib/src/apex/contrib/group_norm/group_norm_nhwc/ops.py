"""The group_norm_nhwc operators: schemas, documentation and fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._ops import library
from ..._shared.native.fakes import expect
from ..._shared.native.operands import statistics_dtype

_Three = tuple[Tensor, Tensor, Tensor]


@library.define(
    "group_norm_nhwc_forward(Tensor x, Tensor? weight, Tensor? bias, int groups, float eps, "
    "bool silu, bool zero_centered_gamma=False) -> (Tensor y, Tensor mean, Tensor rstd)"
)
def group_norm_nhwc_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
    zero_centered_gamma: bool = False,
) -> _Three:
    """Normalize the groups of each sample of ``x``, ``[N, channels, *]`` of any layout.

    ``p = (x - mean) * rstd * weight + bias``, and the result is ``p``, or ``p * sigmoid(p)`` with
    ``silu``, channels-last in memory. ``mean`` and ``rstd`` ``[N * groups]`` are float32, or
    float64 for float64.
    ``weight`` and ``bias`` ``[channels]`` are in any dtype but float64, or in float64 for float64.
    With ``zero_centered_gamma`` the factor is ``1 + weight``, summed in the dtype of the
    statistics.
    """
    _check_groups(x, groups)
    mean = x.new_empty(x.shape[0] * groups, dtype=statistics_dtype(x.dtype))
    return _channels_last(x), mean, torch.empty_like(mean)


@library.define(
    "group_norm_nhwc_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, "
    "Tensor rstd, int groups, float eps, bool silu, bool weight_grads, "
    "bool zero_centered_gamma=False)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)"
)
def group_norm_nhwc_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    groups: int,
    eps: float,
    silu: bool,
    weight_grads: bool,
    zero_centered_gamma: bool = False,
) -> _Three:
    """Gradients of :func:`group_norm_nhwc_forward`; ``dy`` has any layout.

    Those of weight and bias are sums over places and samples, in the weight's dtype (else the
    bias's, else that of ``x``), ``[0]`` without ``weight_grads``. ``eps`` is for decompositions.
    """
    _check_groups(x, groups)
    stored = next(t for t in (weight, bias, x) if t is not None)
    shape = x.shape[1:2] if weight_grads else (0,)
    return _channels_last(x), stored.new_empty(shape), stored.new_empty(shape)


def _check_groups(x: Tensor, groups: int) -> None:
    channels = x.shape[1]
    expect(
        groups > 0 and channels % groups == 0,
        f"groups must divide the {channels} channels of x, got {groups}.",
    )


def _channels_last(x: Tensor) -> Tensor:
    return x.new_empty(x.movedim(1, -1).shape).movedim(-1, 1)
