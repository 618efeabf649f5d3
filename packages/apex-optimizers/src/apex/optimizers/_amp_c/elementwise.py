"""multi_tensor_scale and multi_tensor_axpby."""

from __future__ import annotations

import torch
from torch import Tensor

from apex.multi_tensor_apply.multi_tensor_axpby import multi_tensor_axpby as _axpby
from apex.multi_tensor_apply.multi_tensor_scale import multi_tensor_scale as _scale

from .._shared.native.writes import call_counted
from .lists import Lists, checked_lists


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float
) -> None:
    """``out = in * scale`` for lists ``[in, out]``; flag 1 where an input is inf or NaN.

    Any combination of float32, float16, bfloat16 and float64, one dtype a list. See
    :func:`apex.multi_tensor_apply.multi_tensor_scale`.
    """
    inputs, outputs = checked_lists("multi_tensor_scale", tensor_lists, ("in", "out"))
    if inputs:
        call_counted(_scale, inputs, outputs, noop_flag, float(scale))


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    a: float,
    b: float,
    arg_to_check: int,
) -> None:
    """``out = a * x + b * y`` for lists ``[x, y, out]``; flag 1 where an operand is inf or NaN.

    ``arg_to_check`` is 0 for x, 1 for y, -1 for both. See
    :func:`apex.multi_tensor_apply.multi_tensor_axpby`.
    """
    xs, ys, outputs = checked_lists("multi_tensor_axpby", tensor_lists, ("x", "y", "out"))
    if xs:
        call_counted(_axpby, xs, ys, outputs, noop_flag, float(a), float(b), arg_to_check)
