"""Residual connection and normalization as functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._shared.native.formula import Formula
from .._shared.native.operands import (
    FLOATS,
    amp_to_float32,
    as_rows,
    as_vector,
    exact,
    statistics_dtype,
)
from .._shared.native.plain import plainness
from ..fused_layer_norm.checks import check_operands, rms_eps
from .formulas import add_layer_norm, add_rms_norm


def fused_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    prenorm: bool = False,
    zero_centered_gamma: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Layer normalization of a residual connection's sum, in one pass over memory.

    .. math::
        s = x + \mathrm{residual}, \qquad
        y = \frac{s - \mathrm{mean}(s)}{\sqrt{\mathrm{var}(s) + \epsilon}} \, w + b

    The sum is rounded to its dtype first, and ``y`` is the normalization of what is stored. The
    code for a row is that of :class:`FusedLayerNorm`, so add and norm as two steps give the same
    bits. The backward reads the sum, not its terms, and adds the gradient of ``s`` in the same
    pass: in 16 bits the two steps round once more there.

    Args:
        x: ``[..., *weight.shape]``, what a layer returned.
        residual: shape and device of ``x``; the stream that it is added to. It may be float32
            beside a 16-bit ``x``.
        weight: sizes of the dimensions that are normalized together. Any dtype but float64, and
            float64 for float64 ``x``.
        bias: like ``weight``, or None for zero.
        eps: added to the biased variance, in units of ``s ** 2``; ``>= 0``.
        prenorm: return the sum, too: the residual of the next layer.
        zero_centered_gamma: multiply by ``1 + weight``, as
            :func:`~apex.normalization.fused_layer_norm.fused_layer_norm_affine` does.

    Returns:
        ``y``, shape and dtype of ``x``; with ``prenorm`` ``(y, s)``, where ``s`` has the wider
        dtype of ``x`` and ``residual`` (float32 for float16 and bfloat16). Both contiguous.
        Autocast changes nothing here. Under amp's O1 and O4 all operands are cast to float32.

    Raises:
        TypeError: something is not floating point, or only some of them are float64.
        ValueError: shapes or devices do not match, or ``eps`` is negative.

    Source:
        Ba, Kiros & Hinton, *Layer Normalization*, 2016, equations 3 and 4.

    Example:
        >>> x, residual = torch.randn(2, 4, 64).unbind()
        >>> y, residual = fused_add_layer_norm(x, residual, torch.ones(64), prenorm=True)
        >>> y.shape
        torch.Size([4, 64])
    """
    name, weights = "fused_add_layer_norm", (weight, bias)
    return _run(name, add_layer_norm, x, residual, weights, eps, prenorm, zero_centered_gamma)


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float | None = 1e-6,
    *,
    prenorm: bool = False,
    zero_centered_gamma: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""RMS normalization of a residual connection's sum, in one pass over memory.

    .. math::
        s = x + \mathrm{residual}, \qquad y = \frac{s}{\sqrt{\mathrm{mean}(s^2) + \epsilon}} \, w

    Arguments, results and errors are those of :func:`fused_add_layer_norm`, without a bias.
    ``eps=None`` is machine epsilon as with ``torch.nn.functional.rms_norm``: float32's, or
    float64's for float64 operands.

    Source:
        Zhang & Sennrich, *Root Mean Square Layer Normalization*, NeurIPS 2019.
    """
    eps = rms_eps(x, eps) if eps is None else eps
    name, weights = "fused_add_rms_norm", (weight,)
    return _run(name, add_rms_norm, x, residual, weights, eps, prenorm, zero_centered_gamma)


def _run(
    name: str,
    formula: Formula,
    x: Tensor,
    residual: Tensor,
    weights: tuple[Tensor | None, ...],
    eps: float,
    prenorm: bool,
    zero_centered_gamma: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Check operands and run our kernels; ``weights`` are weight and bias, or the weight."""
    weight = weights[0]
    if (
        (answer := plainness(x, residual, *weights))
        and x is not None
        and residual is not None
        and weight is not None
        and type(eps) is float
        and 0.0 <= eps < math.inf
        and x.dtype is residual.dtype is weight.dtype
        and x.dtype in FLOATS
        and x.layout is torch.strided
        and x.device == residual.device == weight.device
        and x.dim() > 1
        and x.shape == residual.shape
        and x.shape[-1:] == weight.shape
        and weight.is_contiguous()
        and (
            (bias := weights[-1]) is weight  # there is none
            or bias is None
            or (
                (bias.shape, bias.dtype, bias.device) == (weight.shape, x.dtype, x.device)
                and bias.is_contiguous()
            )
        )
    ):
        options = weight.numel(), eps, zero_centered_gamma
        y, total = formula.plain[answer](x.contiguous(), residual.contiguous(), *weights, *options)
    else:
        _check(name, x, residual, weights, eps)
        y, total = _cast_and_run(formula, x, residual, weights, eps, zero_centered_gamma)
    return (y, total) if prenorm else y


def _check(
    name: str, x: Tensor, residual: Tensor, weights: tuple[Tensor | None, ...], eps: float
) -> None:
    """Raise TypeError or ValueError unless the operands of one sum and its norm go together."""
    weight = weights[0]
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name}: weight must be a tensor, got {type(weight).__name__}.")
    if not weight.dim():
        raise ValueError(
            f"{name}: weight must have the shape of the dimensions that are normalized together; "
            "got one without dimensions."
        )
    check_operands(name, x, weights, tuple(weight.shape), eps)
    if not isinstance(residual, Tensor):
        raise TypeError(f"{name}: residual must be a tensor, got {type(residual).__name__}.")
    if residual.shape != x.shape or residual.device != x.device:
        raise ValueError(
            f"{name}: residual must have the shape and device of x, which is {list(x.shape)} on "
            f"{x.device}; got {list(residual.shape)} on {residual.device}."
        )
    dtypes = {t.dtype for t in (x, residual, weight)}
    if not residual.is_floating_point() or (torch.float64 in dtypes and len(dtypes) > 1):
        got = ", ".join(
            f"{argument} {str(t.dtype).removeprefix('torch.')}"
            for argument, t in (("x", x), ("residual", residual), ("weight", weight))
        )
        raise TypeError(
            f"{name}: x, residual and weight must be floating point, and if one is float64, all "
            f"must be; got {got}. Cast them."
        )


def _cast_and_run(
    formula: Formula,
    x: Tensor,
    residual: Tensor,
    weights: tuple[Tensor | None, ...],
    eps: float,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor]:
    """Cast checked operands, exactly, to dtypes for which there is a kernel, and run it."""
    x, residual, *weights = amp_to_float32(x, residual, *weights)
    weight = weights[0]
    dims, options = weight.dim(), (weight.numel(), eps, zero_centered_gamma)
    if x.dtype == residual.dtype == weight.dtype and dims == 1 < x.dim():  # fewer questions
        vectors = [p if p is None else p.contiguous() for p in weights]
        return formula(x.contiguous(), residual.contiguous(), *vectors, *options)
    total = torch.promote_types(x.dtype, residual.dtype)
    wide = x.dtype if x.dtype == total == weight.dtype else statistics_dtype(x.dtype)
    rows, others = as_rows(x, dims), as_rows(residual, dims)
    vectors = [as_vector(p, wide) for p in weights]
    y, total = formula(exact(rows), exact(others, total), *vectors, *options)
    return (y, total) if rows is x else (y.reshape(x.shape), total.reshape(x.shape))
