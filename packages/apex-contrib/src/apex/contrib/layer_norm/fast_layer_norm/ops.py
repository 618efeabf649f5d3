"""The fast_layer_norm operators: schemas, documentation and fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._ops import library

_Three = tuple[Tensor, Tensor, Tensor]


@library.define(
    "fast_layer_norm_forward(Tensor x, Tensor weight, Tensor bias, float eps, "
    "bool zero_centered_gamma=False) -> (Tensor y, Tensor mean, Tensor rstd)"
)
def fast_layer_norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered_gamma: bool = False
) -> _Three:
    """``y = (x - mean) * rstd * weight + bias`` for each row.

    With ``zero_centered_gamma`` it is ``1 + weight``, summed in the dtype of the statistics.
    ``x`` is ``[..., columns]``, contiguous, ``weight`` and ``bias`` are ``[columns]``, all of one
    dtype; ``mean`` and ``rstd`` ``[rows]`` are float32, or float64 for float64.
    """
    rows, dtype = x.numel() // x.shape[-1], torch.promote_types(x.dtype, torch.float32)
    return torch.empty_like(x), x.new_empty(rows, dtype=dtype), x.new_empty(rows, dtype=dtype)


@library.define(
    "fast_layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, "
    "bool weight_grads, bool zero_centered_gamma=False)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)"
)
def fast_layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight_grads: bool,
    zero_centered_gamma: bool = False,
) -> _Three:
    """Gradients of :func:`fast_layer_norm_forward`; ``dy`` has any layout.

    Those of weight and bias are sums over rows, ``[0]`` without ``weight_grads``.
    """
    return _gradients(x, weight, weight_grads)


@library.define(
    "fast_layer_norm_backward_from_output(Tensor dy, Tensor y, Tensor weight, Tensor bias, "
    "Tensor rstd, float eps, bool weight_grads, bool zero_centered_gamma=False)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)"
)
def fast_layer_norm_backward_from_output(
    dy: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    rstd: Tensor,
    eps: float,
    weight_grads: bool,
    zero_centered_gamma: bool = False,
) -> _Three:
    """The same from the output: ``(y - bias) / weight``, the divisor at least ``eps``."""
    return _gradients(y, weight, weight_grads)


def _gradients(saved: Tensor, weight: Tensor, weight_grads: bool) -> _Three:
    shape = weight.shape if weight_grads else (0,)
    return torch.empty_like(saved), weight.new_empty(shape), weight.new_empty(shape)
