"""The operators ``torch.ops.apex.group_norm_nhwc_*``, under the names that Apex registers.

``sums`` are the means of all groups, then their reciprocal standard deviations: ``[2 * N * G]``.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import torch
from torch import Tensor

from .functional import check, is_nhwc, is_silu
from .group_norm_nhwc import ops

_OPTIONS = (
    "int G, Tensor? weight, Tensor? bias, float eps, str? act=None, int passes=1, "
    "bool use_group_norm_v2=False"
)


@functools.cache
def one_time_warning(msg: str) -> None:
    """Warn once per text."""
    warnings.warn(msg, stacklevel=3)


def fake_group_norm_nhwc_fprop(
    x, G, weight, bias, eps, act=None, passes=1, use_group_norm_v2=False
) -> tuple[Tensor, Tensor]:
    """Return ``y``, channels-last, and ``sums``, in float32 at least.

    ``passes``, 1 or 2, and ``use_group_norm_v2`` choose among kernels of Apex, and nothing here.

    Raises:
        TypeError: a dtype is not one of those of ``cuda_group_norm_nhwc_one_pass``.
        ValueError: shapes, devices, ``act`` or ``passes`` are wrong, or ``x`` is not channels-last.
        NotImplementedError: ``APEX_GROUP_NORM_FPROP_SM_MARGIN`` is not 0 without the v2 kernels.
    """
    _check(x, G, weight, bias, eps, passes)
    _check_margin("APEX_GROUP_NORM_FPROP_SM_MARGIN", use_group_norm_v2)
    y, mean, rstd = ops.group_norm_nhwc_forward(x, weight, bias, G, eps, is_silu(act))
    return y, torch.cat((mean, rstd))


def fake_group_norm_nhwc_bprop(
    grad_output, sums, x, G, weight, bias, eps, act=None, passes=1, use_group_norm_v2=False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``x``, weight and bias; errors are those of the forward.

    A ``grad_output`` that is not channels-last is copied, with a warning.
    """
    _check(x, G, weight, bias, eps, passes)
    _check_margin("APEX_GROUP_NORM_BPROP_SM_MARGIN", use_group_norm_v2)
    if grad_output.shape != x.shape:
        raise ValueError(
            f"group_norm_nhwc_bprop: grad_output must have the shape {list(x.shape)} of x, got "
            f"{list(grad_output.shape)}."
        )
    if not is_nhwc(grad_output):
        one_time_warning(
            "group_norm_nhwc_bprop: grad_output is not channels-last and is copied. Keep what "
            "follows GroupNorm channels-last to save that."
        )
    mean, rstd = sums.chunk(2)
    dx, dweight, dbias = ops.group_norm_nhwc_backward(
        grad_output, x, weight, bias, mean, rstd, G, eps, is_silu(act), True
    )
    return dx, dweight, dbias


def _register(name: str, function: Any, schema: str) -> Any:
    """An operator whose fake kernel is the function itself: that calls operators which have one."""
    operator = torch.library.custom_op(f"apex::{name}", function, mutates_args=(), schema=schema)
    operator.register_fake(function)
    return operator


group_norm_nhwc_fprop = _register(
    "group_norm_nhwc_fprop",
    fake_group_norm_nhwc_fprop,
    f"(Tensor x, {_OPTIONS}) -> (Tensor, Tensor)",
)
"""``torch.ops.apex.group_norm_nhwc_fprop``: the normalized input, and what the backward needs."""
group_norm_nhwc_bprop = _register(
    "group_norm_nhwc_bprop",
    fake_group_norm_nhwc_bprop,
    f"(Tensor grad_output, Tensor sums, Tensor x, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
"""``torch.ops.apex.group_norm_nhwc_bprop``: gradients of the input, the weight and the bias."""


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, groups, weight, bias, *options = inputs
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.groups, ctx.options = groups, options
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_output: Tensor, _: Any) -> tuple[Any, ...]:
    x, weight, bias, sums = ctx.saved_tensors
    dx, dweight, dbias = group_norm_nhwc_bprop(
        grad_output, sums, x, ctx.groups, weight, bias, *ctx.options
    )
    of_weight, of_bias = weight is not None, bias is not None
    return dx, None, dweight if of_weight else None, dbias if of_bias else None, *[None] * 4


group_norm_nhwc_fprop.register_autograd(_backward, setup_context=_keep)


def _check(x: Tensor, groups: int, weight: Any, bias: Any, eps: float, passes: int) -> None:
    check(x, groups, weight, bias, eps)
    if not is_nhwc(x):
        raise ValueError(
            f"GroupNorm: x {list(x.shape)} must be channels-last; call "
            "x.contiguous(memory_format=torch.channels_last)."
        )
    if passes not in (1, 2):
        raise ValueError(f"GroupNorm: passes must be 1 or 2, got {passes}.")


def _check_margin(variable: str, use_group_norm_v2: bool) -> None:
    """Kernels here leave no multiprocessors to others; only Apex's second ones can."""
    margin = int(os.environ.get(variable, "0"))
    if margin and not use_group_norm_v2:
        raise NotImplementedError(
            f"GroupNorm: {variable} is {margin}, but only use_group_norm_v2=True takes a margin; "
            "unset it."
        )
