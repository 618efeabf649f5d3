"""fast_layer_norm as a Formula: kernels, and the same in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._shared.native.formula import Formula
from . import ops


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered_gamma: bool = False
) -> tuple[Tensor, ...]:
    rows, scale, b = _wide(x), _scale(weight, zero_centered_gamma), _wide(bias)
    mean = rows.mean(-1, keepdim=True)
    deviation = rows - mean
    rstd = torch.rsqrt(deviation.square().mean(-1, keepdim=True) + eps)
    return (deviation * rstd * scale + b).to(x.dtype), mean.reshape(-1), rstd.reshape(-1)


def _backward(dy, x, weight, mean, rstd, weight_grads, zero_centered_gamma=False):
    """Its derivatives are those of the formula: rstd is a function of x, with the saved value."""
    rows = _wide(x)
    deviation = rows - rows.mean(-1, keepdim=True)
    square = deviation.square().mean(-1, keepdim=True)
    eps = (rstd.reshape(square.shape).square().reciprocal() - square).detach()
    rstd = torch.rsqrt(square + eps)
    scale = _scale(weight, zero_centered_gamma)
    return _gradients(dy, deviation * rstd, rstd, scale, weight_grads, x.dtype)


def _backward_from_output(dy, y, weight, bias, rstd, eps, weight_grads, zero_centered_gamma=False):
    scale = _scale(weight, zero_centered_gamma)
    smallest = max(eps, torch.finfo(scale.dtype).tiny)
    xhat = (_wide(y) - _wide(bias)) / torch.copysign(scale.abs().clamp(min=smallest), scale)
    rstd = rstd.reshape(*y.shape[:-1], 1)
    return _gradients(dy, xhat, rstd, scale, weight_grads, y.dtype)


def _gradients(dy, xhat, rstd, scale, weight_grads, dtype):
    """Those of weight and bias have the dtype of ``dx``, as have all operands of the kernels."""
    dy = _wide(dy)
    g = dy * scale
    dx = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    of_weights = [scale.new_empty([0], dtype=dtype)] * 2
    if weight_grads:
        terms = (dy * xhat, dy)
        of_weights = [t.reshape(-1, t.shape[-1]).sum(0).to(dtype) for t in terms]
    return dx.to(dtype), *of_weights


def _scale(weight: Tensor, zero_centered_gamma: bool) -> Tensor:
    return 1 + _wide(weight) if zero_centered_gamma else _wide(weight)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


layer_norm = Formula(
    "FastLayerNorm",
    ops.fast_layer_norm_forward,
    ops.fast_layer_norm_backward,
    _reference,
    saves=("x", "weight", "mean", "rstd", "zero_centered_gamma"),
    grads=("x", "weight", "bias"),
    rows={"x": 1},
    shared=("weight", "bias"),
    plain_backward=_backward,
)
from_output = layer_norm.from_output(
    ("y", "weight", "bias", "rstd", "eps", "zero_centered_gamma"),
    ops.fast_layer_norm_backward_from_output,
    _backward_from_output,
)
