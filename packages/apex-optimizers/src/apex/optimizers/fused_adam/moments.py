"""States of FusedAdam that take less memory: dtypes of moments, their scales, and remainders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..fused_adam_compact import adam_compact_peaks, adam_step_compact
from ..stepping.buckets import MASTER
from ..stepping.sharding import on_shards

MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = "moment_scales"  # float32 [2]: what stored exp_avg and exp_avg_sq are multiplied by

# Largest stored magnitude, far enough from overflow that rounding up cannot reach it. Moments of
# bfloat16 have the range of float32 and no scale.
_LIMITS = {torch.float16: 32768.0, torch.float8_e4m3fn: 448.0}
_ALIASES = {torch.uint8: torch.float8_e4m3fn}  # TransformerEngine's name for 8-bit moments
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def chosen_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The storage dtype that an argument of the constructor asks for."""
    dtype = _ALIASES.get(dtype, dtype)
    if dtype not in _DTYPES:
        raise ValueError(
            f"FusedAdam: {name} must be torch.float32, float16, bfloat16 or float8_e4m3fn (also "
            f"uint8, as in TransformerEngine), got {dtype}."
        )
    return dtype


def is_scaled(dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether moments of any of these dtypes have scales."""
    return any(dtype in _LIMITS for dtype in dtypes)


def scales_for(peaks: Tensor, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """Powers of two by which moments must be divided to fit their dtypes.

    Args:
        peaks: float64 [..., 2], magnitudes of ``exp_avg`` and ``exp_avg_sq``.
        dtypes: of the two.

    Returns:
        float32, shaped as ``peaks``; 1 where there is nothing, or nothing to scale.
    """
    limits = peaks.new_tensor([_LIMITS.get(dtype, 0.0) for dtype in dtypes])
    # frexp: ratio = fraction * 2**exponent with a fraction in [0.5, 1). At 0.5 the ratio is a power
    # of two itself: a peak that was rounded up to the limit finds the scale it was stored with.
    fraction, exponent = torch.frexp(peaks / limits)
    exponent = exponent - (fraction == 0.5).int()
    # The range of normal float32 numbers, for the scale and for its inverse.
    scales = torch.ldexp(torch.ones_like(peaks), exponent.clamp(-126, 126))
    return torch.where((peaks > 0) & (limits > 0), scales, 1.0).float()


def compact_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    scales: Tensor | None,
    *hyper: Any,
) -> None:
    """adam_step_compact with new scales from the moments that this step will give.

    ``scales`` [len(params), 2] is updated in place; ``hyper`` are the numbers of the operator.
    """
    if scales is None:
        adam_step_compact(params, grads, exp_avgs, exp_avg_sqs, masters, None, None, *hyper)
        return
    _, beta1, beta2, _, weight_decay, _, _, decoupled, gradient_scale = hyper
    l2_decay = 0.0 if decoupled else weight_decay
    peaks = adam_compact_peaks(
        params, grads, exp_avgs, exp_avg_sqs, scales, beta1, beta2, l2_decay, gradient_scale
    )
    new_scales = scales_for(peaks, (exp_avgs[0].dtype, exp_avg_sqs[0].dtype))
    adam_step_compact(params, grads, exp_avgs, exp_avg_sqs, masters, scales, new_scales, *hyper)
    scales.copy_(new_scales)


def unscaled_moment(state: dict[str, Any], key: str) -> Tensor:
    """A moment in float32 (float64 for float64 parameters), whatever it is stored in; exact."""
    stored = state[key]
    if stored.dtype in (torch.float32, torch.float64):
        return stored
    scale = state[SCALES][MOMENTS.index(key)] if stored.dtype in _LIMITS else 1.0
    return on_shards(lambda own: own.float() * scale, stored)


def store_moment(state: dict[str, Any], key: str, value: Tensor, like: Tensor) -> None:
    """Store a moment in the dtype and layout of ``like``; its scale goes to the state, too."""

    def store(target: Tensor, source: Tensor) -> Tensor:
        if target.dtype in _LIMITS:
            finite = torch.where(source.isfinite(), source.double().abs(), 0.0)
            peak = finite.amax() if source.numel() else finite.new_zeros(())
            scale = scales_for(torch.stack([peak, peak]), (target.dtype, target.dtype))[0]
            state[SCALES][MOMENTS.index(key)] = scale
            source = source.float() / scale
        return target.copy_(source)

    state[key] = on_shards(store, torch.empty_like(like), value)


def whole_master(param: Tensor, master: Tensor) -> Tensor:
    """The float32 master, also where only the remainder of a bfloat16 parameter is kept."""
    if master.dtype != torch.int16:
        return master

    def join(rounded: Tensor, remainder: Tensor) -> Tensor:
        rest = remainder.int()
        upper = (rounded.view(torch.int16).int() << 16) - ((rest < 0).int() << 16)
        return (upper | (rest & 0xFFFF)).view(torch.float32)

    return on_shards(join, param.detach(), master)


def remainder_of(param: Tensor, master: Tensor) -> Tensor:
    """The int16 remainder of a float32 master; 0 where the parameter is not the rounded master."""

    def split(rounded: Tensor, whole: Tensor) -> Tensor:
        bits = whole.float().view(torch.int32)
        rest = (bits << 16) >> 16
        upper = (bits >> 16) + (rest < 0).int()
        fits = upper.to(torch.int16) == rounded.view(torch.int16)
        return torch.where(fits, rest, 0).to(torch.int16)

    return on_shards(split, param.detach(), master)


def exported(param: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state as torch.optim and checkpoints know it: float32, without scales."""
    result = {key: value for key, value in entry.items() if key != SCALES}
    for key in MOMENTS:
        if key in entry:
            result[key] = unscaled_moment(entry, key)
    if MASTER in entry:
        result[MASTER] = whole_master(param, entry[MASTER])
    return result
