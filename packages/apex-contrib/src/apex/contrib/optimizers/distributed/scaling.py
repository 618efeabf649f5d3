"""States in 16 bits with a scale per fragment, and what the scales of the next step will be."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import ParameterFragment, StateBucket

STATES = ("params_shard", "exp_avg_shard", "exp_avg_sq_shard")  # in the order of scales
SCALED = ("param", "exp_avg", "exp_avg_sq")
# Largest stored magnitude. bfloat16 has the range of float32: a scale would gain nothing.
_LIMITS = {torch.float16: 32768.0}


def scales_for(peaks: Tensor, dtype: torch.dtype) -> Tensor:
    """Powers of two by which states of these magnitudes must be divided to fit a dtype.

    Args:
        peaks: float64, of any shape.

    Returns:
        float32, shaped as ``peaks``; 1 where nothing is to be scaled.
    """
    limit = _LIMITS.get(dtype)
    if limit is None:
        return torch.ones_like(peaks, dtype=torch.float32)
    fraction, exponent = torch.frexp(peaks / limit)
    exponent = exponent - (fraction == 0.5).int()
    # The range of normal float32 numbers, for the scale and for its inverse.
    scales = torch.ldexp(torch.ones_like(peaks), exponent.clamp(-126, 126))
    return torch.where(peaks > 0, scales, 1.0).float()


def scales_of(bucket: StateBucket) -> Tensor:
    """Scales of a bucket's local fragments, float32 [fragments, 3]; 1 for new ones."""
    count = len(bucket.local_fragments())
    scales = bucket.state_scales
    if scales is None or len(scales) < count:
        grown = torch.ones(count, 3, device=bucket.device)
        if scales is not None:
            grown[: len(scales)] = scales
        bucket.state_scales = grown
    return bucket.state_scales


def store(bucket: StateBucket, fragment: ParameterFragment, state: int, values: Tensor) -> None:
    """Store float32 ``values`` of a local fragment with a scale of their own.

    Args:
        state: 0 for the parameter, 1 and 2 for the moments.
    """
    row = bucket.local_fragments().index(fragment)
    finite = torch.where(values.isfinite(), values.abs(), 0).double()
    scale = scales_for(finite.amax(), bucket.dtype)
    scales_of(bucket)[row, state] = scale
    shard = getattr(bucket, STATES[state])
    shard[slice(*fragment.shard_range)].copy_(values.float() / scale)


def load(bucket: StateBucket, state: int) -> Tensor:
    """A whole shard in float32, scales applied; zero where no fragment lies."""
    shard = getattr(bucket, STATES[state])
    whole = torch.zeros_like(shard, dtype=torch.float32)
    scales = scales_of(bucket)
    for row, fragment in enumerate(bucket.local_fragments()):
        part = slice(*fragment.shard_range)
        whole[part] = shard[part].float() * scales[row, state]
    return whole


def as_dict(buckets: list[StateBucket]) -> dict[tuple[int, int, int], dict[str, Tensor]]:
    """Scales by ids of group, parameter and bucket, as Apex keeps them."""
    return {
        (f.param_group_id, f.param_id, f.bucket_id): dict(zip(SCALED, row.unbind(), strict=True))
        for bucket in buckets
        for f, row in zip(bucket.local_fragments(), scales_of(bucket), strict=False)
    }
