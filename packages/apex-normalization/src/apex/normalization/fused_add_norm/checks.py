"""Checks of what users pass to the fused add-and-normalize ops; failures name the argument."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._shared.native.operands import FLOATS
from ..fused_layer_norm.checks import check_operands


def are_right(x: Any, residual: Any, weight: Any, bias: Any, eps: Any) -> bool:
    """Whether plain tensors, or None, have one dtype, and :func:`check_add_operands` is silent."""
    if x is None or residual is None or weight is None or type(eps) is not float:
        return False
    shape, kind = x.shape[-1:], (x.dtype, x.device)
    if bias is not None and (bias.shape, bias.dtype, bias.device) != (shape, *kind):
        return False
    if kind != (residual.dtype, residual.device) or kind != (weight.dtype, weight.device):
        return False
    fits = x.dim() > 1 and x.shape == residual.shape and shape == weight.shape
    return fits and x.dtype in FLOATS and x.layout is torch.strided and 0.0 <= eps < math.inf


def check_add_operands(
    name: str, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> None:
    """Check the operands of one sum and its normalization.

    Raises:
        TypeError: something is not a floating-point tensor, or only some of them are float64.
        ValueError: shapes or devices do not go together, or eps is out of range.
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name}: weight must be a tensor, got {type(weight).__name__}.")
    if not weight.dim():
        raise ValueError(
            f"{name}: weight must have the shape of the dimensions that are normalized together; "
            "got one without dimensions."
        )
    check_operands(name, x, weight, bias, tuple(weight.shape), eps, mixed=True)
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
