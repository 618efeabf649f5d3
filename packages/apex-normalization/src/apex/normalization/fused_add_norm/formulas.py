"""The add-and-normalize ops as Formulas: ``(x, residual, weight...) -> (y, sum)``.

Both backwards read the sum alone. Their gradients of x and residual are one tensor where these
have one dtype; else the kernel returns the same numbers rounded to x's dtype, too.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._shared.native.formula import Formula
from ..fused_layer_norm import formulas as norms
from . import ops


def _layer_norm_reference(x, residual, weight, bias, columns, eps, zero_centered_gamma=False):
    total, options = (x + residual).to(residual.dtype), (columns, eps, zero_centered_gamma)
    y, mean, rstd = norms.layer_norm_reference(total, weight, bias, *options, out_dtype=x.dtype)
    return y, total, mean, rstd


def _rms_norm_reference(x, residual, weight, columns, eps, zero_centered_gamma=False):
    total, options = (x + residual).to(residual.dtype), (columns, eps, zero_centered_gamma)
    y, rstd = norms.rms_norm_reference(total, weight, *options, out_dtype=x.dtype)
    return y, total, rstd


def _layer_norm_backward(dy, dsum, sum, weight, mean, rstd, *options):
    return _norm_backward(dy, dsum, sum, weight, rstd, *options, has_mean=True)


def _norm_backward(
    dy, dsum, sum, weight, rstd, columns, weight_grads, zero_centered_gamma=False, *, has_mean=False
):
    grad, rows = (norms.wide_rows(t, sum, columns=columns) for t in (dy, sum))
    at = norms.normalized(rows, rstd, has_mean)
    dx, *terms = norms.gradients(grad, *at, weight, zero_centered_gamma, has_mean)
    weights = (norms.sums(t, weight.dtype, weight_grads) for t in terms)
    return *_of_terms(dx, dy, dsum, sum), *weights


def _of_terms(dx: Tensor, dy: Tensor, dsum: Tensor | None, sum: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of residual and x, as the kernels return them."""
    if dsum is not None:
        dx = dx + dsum.reshape(dx.shape)
    narrow = dy.new_empty([0]) if dy.dtype == sum.dtype else dx.to(dy.dtype).reshape(-1)
    return dx.to(sum.dtype).reshape(dy.shape), narrow


def _arrange(dresidual: Tensor, dx: Tensor, *of_weights: Tensor) -> tuple[Tensor, ...]:
    return dresidual, dx.view_as(dresidual) if dx.numel() else dresidual, *of_weights


_OPTIONS: dict[str, Any] = {"rows": {"x": 1, "residual": 1}, "outputs": 2, "arrange": _arrange}

add_layer_norm = Formula(
    "fused_add_layer_norm",
    ops.add_layer_norm_forward,
    ops.add_layer_norm_backward,
    _layer_norm_reference,
    saves=("sum", "weight", "mean", "rstd", "columns", "zero_centered_gamma"),
    grads=("residual", "x", "weight", "bias"),
    shared=("weight", "bias"),
    plain_backward=_layer_norm_backward,
    **_OPTIONS,
)
add_rms_norm = Formula(
    "fused_add_rms_norm",
    ops.add_rms_norm_forward,
    ops.add_rms_norm_backward,
    _rms_norm_reference,
    saves=("sum", "weight", "rstd", "columns", "zero_centered_gamma"),
    grads=("residual", "x", "weight"),
    shared=("weight",),
    plain_backward=_norm_backward,
    **_OPTIONS,
)
norms.TABLE.update(add_layer_norm.decompositions() | add_rms_norm.decompositions())
