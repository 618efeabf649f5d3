"""States of FusedAdam that take less memory: their dtypes, their scales, and remainders."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ..fused_adam_compact import adam_compact_peaks, adam_step_compact
from ..stepping.buckets import MASTER
from ..stepping.sharding import on_shards

MOMENTS = ("exp_avg", "exp_avg_sq")
LARGEST = "max_exp_avg_sq"  # of AMSGrad, never in fewer bits
SCALED = (*MOMENTS, MASTER)  # what may have scales, in the order of these
SCALES = "state_scales"  # float32 [3]: what is stored of SCALED is multiplied by

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
    """Whether states of any of these dtypes have scales."""
    return any(dtype in _LIMITS for dtype in dtypes)


def scales_for(peaks: Tensor, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """Powers of two by which states must be divided to fit their dtypes.

    Args:
        peaks: float64 [..., n], largest magnitudes of some states.
        dtypes: of these n.

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


def _multiplied(grad: Tensor, factor: Tensor) -> Tensor:
    """A copy of a gradient times a float32 factor [1], rounded once and without waiting for it.

    The factor gets the gradient's number of dimensions: one without dimensions would be rounded to
    the gradient's 16 bits before the product on a GPU.
    """
    return torch.mul(grad, factor.reshape([1] * grad.dim()), out=torch.empty_like(grad))


def compact_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    _: list[Tensor],
    masters: list[Tensor],
    scales: Tensor | None,
    clip: Tensor | None,
    *hyper: Any,
) -> None:
    """adam_step_compact with new scales from the states that this step will give.

    ``scales`` [len(params), 3] is updated in place; ``hyper`` are the numbers of the operator.
    Copies of the gradients times ``clip`` are used: the operator does not clip by itself.
    """
    states = (exp_avgs, exp_avg_sqs, masters)
    if clip is not None and clip.is_cpu:
        grads = torch._foreach_mul(grads, clip.item())
    elif clip is not None:
        grads = list(map(_multiplied, grads, repeat(clip.float())))
    if scales is None:
        adam_step_compact(params, grads, *states, None, None, *hyper)
        return
    peaks = adam_compact_peaks(params, grads, *states, scales, *hyper)
    dtypes = tuple(own[0].dtype for own in states if own)[: peaks.shape[1]]
    new_scales = torch.ones_like(scales)
    new_scales[:, : peaks.shape[1]] = scales_for(peaks, dtypes)
    adam_step_compact(params, grads, *states, scales, new_scales, *hyper)
    scales.copy_(new_scales)


def unscaled(state: dict[str, Any], key: str) -> Tensor:
    """A state of 16 or 8 bits in float32, exactly; wider ones as they are."""
    stored = state[key]
    if stored.dtype.itemsize > 2:
        return stored
    if stored.dtype not in _LIMITS or SCALES not in state:
        return on_shards(Tensor.float, stored)
    scale = state[SCALES][SCALED.index(key)]
    return on_shards(lambda own: own.float() * scale, stored)


def store_scaled(target: Tensor, source: Tensor, scale: Tensor) -> None:
    """Store finite numbers in a dtype that needs a scale, which is written to ``scale`` []. inf and
    NaN are stored as such.
    """
    finite = torch.where(source.isfinite(), source.double().abs(), 0.0)
    peak = finite.amax() if source.numel() else finite.new_zeros(())
    scale.copy_(scales_for(peak.reshape(1), (target.dtype,))[0])
    target.copy_(source.float() / scale)


def store_state(state: dict[str, Any], key: str, value: Tensor, like: Tensor) -> None:
    """Keep a state in the dtype and layout of ``like``; its scale goes to the state, too."""

    def store(target: Tensor, source: Tensor) -> Tensor:
        if target.dtype in _LIMITS:
            store_scaled(target, source, state[SCALES][SCALED.index(key)])
            return target
        return target.copy_(source)

    state[key] = on_shards(store, torch.empty_like(like), value)


def whole_master(param: Tensor, state: dict[str, Any]) -> Tensor:
    """The float32 master, also where it has a scale, or is the remainder of its parameter.

    A remainder without its bfloat16 parameter, which has got other memory, is of no use: then the
    master is the parameter's value.
    """
    master = state[MASTER]
    if master.dtype != torch.int16:
        return unscaled(state, MASTER)
    if param.dtype != torch.bfloat16:
        return param.detach().float()

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
            result[key] = unscaled(entry, key)
    if MASTER in entry:
        result[MASTER] = whole_master(param, entry)
    return result
