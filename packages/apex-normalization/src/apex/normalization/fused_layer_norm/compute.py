"""Checks, casts and kernel calls of the operators under Apex's names, without autograd.

``norm`` is one of ``formulas.py``. ``weights`` are those of its forward: weight and bias of a layer
norm, or the weight of an RMS norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._shared.native.operands import exact, statistics_dtype
from .checks import Shape, as_shape, check_operands
from .formulas import Norm, kernel_dtypes


def normalize(
    name: str,
    norm: Norm,
    x: Tensor,
    weights: tuple[Tensor | None, ...],
    normalized_shape: Shape,
    eps: float,
    mixed: bool = False,
) -> tuple[Tensor, ...]:
    """Return y and its statistics, mean and rstd or rstd; ``name`` is the caller's, for messages.

    Statistics have the statistics' dtype of ``x``, as from Apex's kernels. Those of a float64
    kernel, which a float64 weight asks for, are wider, and cast.
    """
    shape = as_shape(name, normalized_shape)
    check_operands(name, x, weights, shape, eps, mixed)
    out_dtype = x.dtype if weights[0] is None else weights[0].dtype
    x_dtype, weight_dtype = kernel_dtypes(x.dtype, out_dtype)
    given = exact(x, x_dtype), *_operands(weights, weight_dtype), math.prod(shape), eps
    y, *statistics = norm.from_input.forward(*given)
    if x_dtype != x.dtype:
        statistics = _all_cast(statistics, statistics_dtype(x.dtype))
    return _cast(y, out_dtype), *statistics


def gradients(
    norm: Norm,
    dy: Tensor,
    statistics: tuple[Tensor | None, ...],
    saved: Tensor,
    weights: tuple[Tensor | None, ...],
    normalized_shape: Shape,
    eps: float,
    from_output: bool,
    weight_grads: bool,
) -> tuple[Tensor | None, ...]:
    """Return dx, in the dtype of ``saved``, and gradients of ``weights``, in dy's.

    The latter are None without ``weight_grads``. ``statistics`` are those of :func:`normalize`;
    a mean is not read ``from_output``.
    """
    x_dtype, weight_dtype = kernel_dtypes(saved.dtype, dy.dtype, from_output)
    statistics = _all_cast(statistics, statistics_dtype(x_dtype))
    columns = math.prod(as_shape(f"{norm.name}_backward", normalized_shape))
    dy_ = exact(dy, weight_dtype)
    if from_output:
        given = *_operands(weights, weight_dtype), statistics[-1], columns, eps
        dx, *sums = norm.from_output.backward(dy_, exact(saved, weight_dtype), *given, weight_grads)
    else:
        given = *_operands(weights[:1], weight_dtype), *statistics, columns
        dx, *sums = norm.from_input.backward(dy_, exact(saved, x_dtype), *given, weight_grads)
    dx = _cast(dx, saved.dtype)
    if not weight_grads:
        return dx, *[None] * len(sums)
    sums = _all_cast(sums, dy.dtype)
    return dx, *(sums if weights[0].dim() == 1 else [s.view_as(weights[0]) for s in sums])


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor`` in ``dtype``; itself when it has that, which costs no call of torch."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _all_cast(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    return [t if t is None or t.dtype == dtype else t.to(dtype) for t in tensors]


def _operands(weights: Sequence[Tensor | None], dtype: torch.dtype) -> Sequence[Tensor | None]:
    """Return ``weights`` as kernels take them."""
    return weights if weights[0] is None else [w if w is None else exact(w, dtype) for w in weights]
