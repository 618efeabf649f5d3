"""Contiguous buffers of gradients and parameters, and which part of them a bucket has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import NAME
from .layout import GradientBucket, shaped_view


def param_buffer_of(optimizer: Any, bucket_id: int) -> Tensor | None:
    """The part of the contiguous parameter buffers that a bucket has; None without them."""
    bucket = optimizer.state["buckets"][bucket_id]
    buffer = optimizer._param_buffers.get(bucket.dtypes())
    end = bucket.contiguous_buffer_offset + bucket.bucket_size
    if buffer is None or end > buffer.numel():
        return None
    return buffer[bucket.contiguous_buffer_offset : end]


def grad_buffer_of(optimizer: Any, bucket_id: int) -> Tensor:
    """The part of the contiguous gradient buffers that a bucket has, zero at first."""
    known = optimizer._grad_buffers
    if bucket_id not in known:
        missing = [(i, b) for i, b in enumerate(optimizer.state["buckets"]) if i not in known]
        for kind in sorted({bucket.grad_sync_dtype for _, bucket in missing}, key=str):
            own = [(i, b) for i, b in missing if b.grad_sync_dtype == kind]
            sizes = [bucket.bucket_size for _, bucket in own]
            flat = _new_grad_buffer(optimizer, sum(sizes), kind)
            known.update(zip([i for i, _ in own], flat.split(sizes), strict=True))
    return known[bucket_id]


def _new_grad_buffer(optimizer: Any, size: int, dtype: torch.dtype) -> Tensor:
    if not optimizer.nccl_ub:
        return torch.zeros(size, dtype=dtype, device=optimizer.device)
    from ... import nccl_allocator  # few need it

    if optimizer.nccl_pool is None:  # kept, because its memory is registered as long as it lives
        optimizer.nccl_pool = nccl_allocator.create_nccl_mem_pool()
    group = optimizer.distributed_process_group
    with nccl_allocator.nccl_mem(optimizer.nccl_pool, device=optimizer.device, group=group):
        return torch.zeros(size, dtype=dtype, device=optimizer.device)


def slots_of(optimizer: Any, bucket_id: int) -> dict[int, Tensor]:
    """The parts of a bucket's memory that belong to fragments, by where they begin."""
    bucket: GradientBucket = optimizer.grads_buckets[bucket_id]
    state = optimizer.state["buckets"][bucket_id]
    if bucket.grads_bucket is None:
        if optimizer.contiguous_grad_buffer:
            bucket.grads_bucket = grad_buffer_of(optimizer, bucket_id)
        else:
            bucket.grads_bucket = torch.empty(
                state.bucket_size, dtype=state.grad_sync_dtype, device=state.device
            )
        bucket.slots, bucket.gaps = state.cut(bucket.grads_bucket)
    elif len(bucket.slots) < len(state.fragments):  # more parameters since then
        bucket.slots, bucket.gaps = state.cut(bucket.grads_bucket)
    return bucket.slots


def zero_rest(bucket: GradientBucket) -> None:
    """Zero what holds no gradient in a bucket that is about to leave."""
    rest = [slot for place, slot in bucket.slots.items() if place not in bucket.written]
    rest += bucket.gaps
    if rest:
        torch._foreach_zero_(rest)


def grad_buffer_view(optimizer: Any, param: Tensor) -> Tensor:
    """The part of the contiguous gradient buffer that a parameter has, in its shape.

    Raises:
        RuntimeError: there is no such buffer, or the parameter lies in several buckets.
    """
    optimizer.init_params(param)
    fragments = optimizer.state[param]["fragments"]
    if not optimizer.contiguous_grad_buffer or len(fragments) != 1:
        raise RuntimeError(
            f"{NAME}.grad_buffer_view: contiguous_grad_buffer is "
            f"{optimizer.contiguous_grad_buffer} and the parameter lies in {len(fragments)} "
            "buckets, expected True and 1. A larger bucket_cap_mb keeps it in one."
        )
    slots = slots_of(optimizer, fragments[0].bucket_id)
    return shaped_view(param, slots[fragments[0].bucket_range[0]])


def zero_gradients(optimizer: Any, set_to_none: bool) -> None:
    """Set ``param.grad`` of all parameters to None, to zero, or to views of the buffers."""
    viewed = optimizer.contiguous_grad_buffer and not set_to_none
    for param in optimizer.parameters():
        fragments = optimizer.state[param].get("fragments", ()) if viewed else ()
        if len(fragments) == 1 and param.requires_grad and param.dtype == optimizer.grad_sync_dtype:
            param.grad = grad_buffer_view(optimizer, param)
        elif set_to_none or optimizer.contiguous_grad_buffer or param.grad is None:
            param.grad = None
        else:
            param.grad = torch.zeros_like(param.grad)
