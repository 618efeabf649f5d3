"""Reading and writing a rank's share of the state, in whatever form it is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import scaling
from .buffers import param_buffer_of
from .layout import ParameterBucket, ParameterFragment, StateBucket
from .parameters import finish_gather, start_gather
from .step import own_part

KEYS = ("param", "exp_avg", "exp_avg_sq")


def value_dtype(optimizer: Any) -> torch.dtype:
    """In which values are given and taken: ``dtype``, or float32 for states with scales."""
    return torch.float32 if optimizer.with_scaled_states else optimizer.dtype


def join(high: Tensor, rest: Tensor) -> Tensor:
    """float32 values whose upper halves, rounded, are bfloat16, and whose lower ones int16."""
    upper = high.contiguous().view(torch.int16).int() - (rest < 0).int()
    return ((upper << 16) | (rest.int() & 0xFFFF)).view(torch.float32)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """The halves of float32 values: bfloat16, with ties rounded away from zero, and int16."""
    bits = values.contiguous().view(torch.int32)
    low = bits & 0xFFFF
    rest = torch.where(low >= 0x8000, low - 0x10000, low)
    high = ((bits >> 16) + (rest < 0).int()).to(torch.int16).view(torch.bfloat16)
    is_nan = values.isnan()
    return torch.where(is_nan, values.bfloat16(), high), torch.where(is_nan, 0, rest).short()


def read(optimizer: Any, bucket: StateBucket, fragment: ParameterFragment, key: str) -> Tensor:
    """This rank's values of a fragment: a view of the state where that holds them as they are."""
    part = slice(*fragment.shard_range)
    if key == "param" and bucket.params_shard is None:
        own = own_part(optimizer, fragment)
        if bucket.param_remainders_shard is not None:
            return join(own, bucket.param_remainders_shard[part])
        return own.to(value_dtype(optimizer))
    state = KEYS.index(key)
    stored = getattr(bucket, scaling.STATES[state])[part]
    if not optimizer.with_scaled_states:
        return stored
    row = bucket.local_fragments().index(fragment)
    return stored.float() * scaling.scales_of(bucket)[row, state]


def write(
    optimizer: Any, bucket: StateBucket, fragment: ParameterFragment, key: str, values: Tensor
) -> None:
    """Make ``values`` this rank's values of a fragment."""
    part = slice(*fragment.shard_range)
    values = values.to(bucket.device)
    if key == "param" and bucket.params_shard is None:
        own = own_part(optimizer, fragment)
        if bucket.param_remainders_shard is not None:
            high, rest = split(values.float())
            own.copy_(high)
            bucket.param_remainders_shard[part].copy_(rest)
        else:
            own.copy_(values)
        return
    state = KEYS.index(key)
    if optimizer.with_scaled_states:
        scaling.store(bucket, fragment, state, values.float())
    else:
        getattr(bucket, scaling.STATES[state])[part].copy_(values)


@torch.no_grad()
def write_all(optimizer: Any, param: Tensor, key: str, flat: Tensor) -> None:
    """Make ``flat``, in the parameter's order of memory, this rank's values of the parameter."""
    for fragment in optimizer.state[param].get("fragments", ()):
        if fragment.in_local_shard:
            bucket = optimizer.state["buckets"][fragment.bucket_id]
            values = flat[slice(*fragment.shard_param_range)]
            write(optimizer, bucket, fragment, key, values)


@torch.no_grad()
def send_parameters(optimizer: Any) -> None:
    """Give all ranks the parameters of which each holds its share; a collective call."""
    for bucket_id, state in enumerate(optimizer.state["buckets"]):
        buffer = param_buffer_of(optimizer, bucket_id)
        begin = state.shard_size * optimizer.distributed_rank
        dtype = state.param_sync_dtype
        is_sent = dtype.is_floating_point  # as it is; else as integers, made from float32
        if not is_sent:
            dtype = torch.float32
        shard = torch.zeros(state.shard_size, dtype=dtype, device=state.device)
        if buffer is not None and is_sent:
            shard = buffer[begin : begin + state.shard_size]
        for fragment in state.local_fragments():
            is_split = state.param_remainders_shard is not None
            values = own_part(optimizer, fragment) if is_split else None
            values = read(optimizer, state, fragment, "param") if values is None else values
            shard[slice(*fragment.shard_range)].copy_(values)
        bucket = optimizer._params_buckets[bucket_id] = ParameterBucket()
        bucket.params_shard = shard
        optimizer._check_params_shard_dtypes({bucket_id: bucket})
        start_gather(optimizer, bucket_id)
        finish_gather(optimizer, bucket_id)
