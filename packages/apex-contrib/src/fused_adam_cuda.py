"""Apex's extension module of its first Adam: positional signatures over this wheel's operators.

Flags are int32 with one element; functions read and set them on the device. ``mode`` 0 has the
epsilon inside the root, 1 outside. Copies of parameters are float32, float16, bfloat16 or uint8,
which are the upper bytes of float16 numbers. A copy without elements is left out. Importable only
where the kernels can run, because callers take the import as that answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex.contrib._ops import library
from apex.contrib._shared.native.writes import call_counted
from apex.contrib.optimizers import legacy_adam as _ops
from apex.contrib.optimizers.given_lists import number_near as _number_near
from apex.contrib.optimizers.given_lists import raw_lists as _raw_lists

library.require_for_import(__name__, "legacy_adam")

__all__ = [
    "adam",
    "adam_mt",
    "maybe_adam_undo",
    "maybe_cast",
    "maybe_cast_mt",
    "reversible_adam",
    "strided_check_finite",
]

_HIGH_BYTE_OF_INFINITY = 0x7C


@torch.no_grad()
def strided_check_finite(
    overflow_flag: Tensor, p_copy: Tensor, stride: int, clear_overflow_first: int
) -> None:
    """Set ``overflow_flag`` if one of every ``stride`` elements of ``p_copy`` is not finite.

    With ``clear_overflow_first`` it is 0 otherwise; without, it stays as it is.
    """
    sample = p_copy.reshape(-1)[::stride]
    if p_copy.dtype == torch.uint8:
        is_bad = (sample & _HIGH_BYTE_OF_INFINITY) == _HIGH_BYTE_OF_INFINITY
    else:
        is_bad = ~sample.isfinite()
    found = is_bad.any().to(overflow_flag.dtype).reshape(overflow_flag.shape)
    if clear_overflow_first:
        overflow_flag.copy_(found)
    else:
        overflow_flag.copy_(torch.where(found != 0, found, overflow_flag))


@torch.no_grad()
def adam(
    p: Tensor,
    p_copy: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: float,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """Step one tensor; see :func:`apex.contrib.optimizers.legacy_adam.scaled_adam_step`."""
    numbers = (lr, beta1, beta2, eps, decay, grad_scale, None)
    options = _options("fused_adam_cuda.adam", step, mode, bias_correction)
    _step([[p], [g], [m], [v], _copies(p_copy)], numbers, options)


@torch.no_grad()
def reversible_adam(
    p: Tensor,
    p_copy: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: float,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """:func:`adam` that :func:`maybe_adam_undo` can take back.

    Elements whose gradient is not finite are left as they are, and the first element of ``p_copy``
    becomes infinite then, which :func:`strided_check_finite` finds.
    """
    numbers = (lr, beta1, beta2, eps, decay, grad_scale, None)
    options = _options("fused_adam_cuda.reversible_adam", step, mode, bias_correction)
    overflow = torch.zeros(1, dtype=torch.int32, device=p.device)
    _step([[p], [g], [m], [v], _copies(p_copy)], numbers, (*options, overflow))
    if p_copy.numel():
        first = p_copy.view(-1)[:1]
        is_byte = p_copy.dtype == torch.uint8
        infinite = torch.full_like(first, _HIGH_BYTE_OF_INFINITY if is_byte else float("inf"))
        first.copy_(torch.where(overflow != 0, infinite, first))


@torch.no_grad()
def adam_mt(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: float,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """:func:`adam` for lists ``[p, m, v, g]`` or ``[p, m, v, g, p_copy]``.

    Nothing is done where the flag is set. ``chunk_size`` has no effect.
    """
    name = "fused_adam_cuda.adam_mt"
    p, m, v, g, *copies = _raw_lists(name, tensor_lists, "p", "m", "v", "g", "p_copy?")
    if p:
        numbers = (lr, beta1, beta2, eps, decay, grad_scale, None)
        flag = _number_near(noop_flag, p[0], torch.int32)
        options = _options(name, step, mode, bias_correction)
        _step([p, g, m, v, copies[0] if copies else []], numbers, (*options, None, flag))


@torch.no_grad()
def maybe_adam_undo(
    overflow_flag: Tensor,
    p: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: float,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """Take :func:`reversible_adam` of the same arguments back if the flag is set."""
    options = _options("fused_adam_cuda.maybe_adam_undo", step, mode, bias_correction)
    flag = _number_near(overflow_flag, p, torch.int32)
    numbers = tuple(map(float, (lr, beta1, beta2, eps, decay, grad_scale)))
    call_counted(_ops.scaled_adam_undo, [p], [g], [m], [v], flag, *numbers, *options)


@torch.no_grad()
def maybe_cast(overflow_flag: Tensor, p_in: Tensor, p_out: Tensor) -> None:
    """Write ``p_in`` to ``p_out`` in the other's dtype, unless the flag is set."""
    maybe_cast_mt(0, overflow_flag, [[p_in], [p_out]])


@torch.no_grad()
def maybe_cast_mt(
    chunk_size: int, overflow_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]]
) -> None:
    """:func:`maybe_cast` for lists ``[p_in, p_out]``; ``chunk_size`` has no effect."""
    inputs, outputs = _raw_lists("fused_adam_cuda.maybe_cast_mt", tensor_lists, "p_in", "p_out")
    if inputs:
        flag = _number_near(overflow_flag, inputs[0], torch.int32)
        call_counted(_ops.cast_unless, inputs, outputs, flag)


def _copies(p_copy: Tensor) -> list[Tensor]:
    return [p_copy] if p_copy.numel() else []


def _options(name: str, step: int, mode: int, bias_correction: int) -> tuple:
    if mode not in (0, 1):
        raise RuntimeError(
            f"{name}: mode must be 0 (epsilon inside the root) or 1 (outside), got {mode}."
        )
    return int(step), bool(bias_correction), mode == 0


def _step(lists: list[list[Tensor]], numbers: tuple, options: tuple) -> None:
    *floats, device_scale = numbers
    call_counted(_ops.scaled_adam_step, *lists, *map(float, floats), device_scale, *options)
