"""Decompositions of the add-and-normalize operators into ATen's; see those of fused_layer_norm."""

from __future__ import annotations

from torch._decomp import register_decomposition

from ..fused_layer_norm import plain
from ..fused_layer_norm.decompositions import TABLE
from ..fused_layer_norm.dtypes import statistics_dtype
from . import ops


@register_decomposition(ops.add_layer_norm_forward, TABLE)
def _add_layer_norm_forward(x, residual, weight, bias, columns, eps):
    total = (x + residual).to(residual.dtype)
    rows = total.reshape(-1, columns)
    y, mean, rstd = plain.layer_norm(rows, weight, bias, 1, eps, x.dtype)
    wide = statistics_dtype(x.dtype)
    return y.reshape(x.shape), total, mean.reshape(-1).to(wide), rstd.reshape(-1).to(wide)


@register_decomposition(ops.add_rms_norm_forward, TABLE)
def _add_rms_norm_forward(x, residual, weight, columns, eps):
    total = (x + residual).to(residual.dtype)
    y, rstd = plain.rms_norm(total.reshape(-1, columns), weight, 1, eps, x.dtype)
    return y.reshape(x.shape), total, rstd.reshape(-1).to(statistics_dtype(x.dtype))


@register_decomposition(ops.add_layer_norm_backward, TABLE)
def _add_layer_norm_backward(dy, dsum, sum, weight, mean, rstd, columns, weight_grads):
    grad, values = (t.reshape(-1, columns).to(rstd.dtype) for t in (dy, sum))
    scale = rstd.reshape(-1, 1)
    xhat = (values - mean.reshape(-1, 1)) * scale
    g = grad * weight.to(grad.dtype)
    dx = scale * (g - g.mean(1, keepdim=True) - xhat * (g * xhat).mean(1, keepdim=True))
    sums = [_column_sums(t, weight, weight_grads) for t in (grad * xhat, grad)]
    return *_input_grads(dx, dy, dsum, sum), *sums


@register_decomposition(ops.add_rms_norm_backward, TABLE)
def _add_rms_norm_backward(dy, dsum, sum, weight, rstd, columns, weight_grads):
    grad, values = (t.reshape(-1, columns).to(rstd.dtype) for t in (dy, sum))
    scale = rstd.reshape(-1, 1)
    xhat = values * scale
    g = grad * weight.to(grad.dtype)
    dx = scale * (g - xhat * (g * xhat).mean(1, keepdim=True))
    return *_input_grads(dx, dy, dsum, sum), _column_sums(grad * xhat, weight, weight_grads)


def _input_grads(dx, dy, dsum, sum):
    if dsum is not None:
        dx = dx + dsum.reshape(dx.shape)
    narrow = dy.new_empty([0]) if dy.dtype == sum.dtype else dx.to(dy.dtype).reshape(-1)
    return dx.to(sum.dtype).reshape(dy.shape), narrow


def _column_sums(values, weight, wanted):
    return values.sum(0).to(weight.dtype) if wanted else weight.new_empty([0])
