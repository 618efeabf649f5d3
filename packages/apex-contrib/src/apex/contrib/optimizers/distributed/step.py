"""The fused step on the fragments of this rank's shard of a bucket."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from ..._shared.native.writes import call_counted
from ..distributed_adam import distributed_adam_peaks, distributed_adam_step
from . import planner, scaling
from .buffers import param_buffer_of
from .layout import ParameterBucket, ParameterFragment, StateBucket, flat_view

Span = tuple[int, int]


def step_bucket(optimizer: Any, bucket_id: int, count: Any) -> ParameterBucket:
    """Step this rank's shard, and return the bucket with its new values.

    Args:
        count: of the step that is taken, 1 for the first; a number, or int32 on the device.
    """
    state: StateBucket = optimizer.state["buckets"][bucket_id]
    grads = optimizer.grads_buckets[bucket_id].grads_shard
    new = ParameterBucket()
    new.params_bucket, new.params_shard = new_values(optimizer, bucket_id)
    by_group: dict[int, list[ParameterFragment]] = defaultdict(list)
    rows: dict[int, list[int]] = defaultdict(list)
    new.params_updated = frozen = frozen_parameters(optimizer, state)
    for row, fragment in enumerate(state.local_fragments()):
        if (fragment.param_group_id, fragment.param_id) not in frozen:
            by_group[fragment.param_group_id].append(fragment)
            rows[fragment.param_group_id].append(row)
    for group_id, fragments in by_group.items():
        step_group(optimizer, group_id, state, grads, new.params_shard, fragments, rows, count)
    return new


def frozen_parameters(optimizer: Any, state: StateBucket) -> set[tuple[int, int]]:
    """Ids of group and parameter of those in a bucket that keep their values."""
    groups = optimizer.param_groups
    return {
        (f.param_group_id, f.param_id)
        for f in state.fragments
        if not groups[f.param_group_id]["params"][f.param_id].requires_grad
    }


def new_values(optimizer: Any, bucket_id: int) -> tuple[Tensor | None, Tensor]:
    """Memory for a bucket's new values, if it is sent as it is, and this rank's shard of it."""
    state = optimizer.state["buckets"][bucket_id]
    sync, scaled = state.param_sync_dtype, optimizer.with_scaled_states
    is_sent = sync.is_floating_point
    if not is_sent:
        sync = state.dtype if not scaled else torch.float32
    whole = param_buffer_of(optimizer, bucket_id) if is_sent else None
    is_kept = state.params_shard is not None and sync == state.dtype and not scaled
    if whole is None and is_kept and (optimizer.distributed_size == 1 or not is_sent):
        return None, state.params_shard
    if whole is None and is_sent:
        whole = torch.empty(state.bucket_size, dtype=sync, device=state.device)
    if whole is None:
        return None, torch.zeros(state.shard_size, dtype=sync, device=state.device)
    return whole, whole.split(state.shard_size)[optimizer.distributed_rank]


def step_group(
    optimizer: Any,
    group_id: int,
    state: StateBucket,
    grads: Tensor,
    new: Tensor,
    fragments: list[ParameterFragment],
    rows: dict[int, list[int]],
    count: Any,
) -> None:
    """Step the fragments of one parameter group."""
    group = optimizer.param_groups[group_id]
    numbers = numbers_of(optimizer, group, count)
    if optimizer.with_scaled_states:
        step_scaled(state, grads, new, fragments, rows[group_id], numbers)
        return
    if state.params_shard is not None:
        spans = [f.shard_range for f in fragments]
        if group["eps"] != 0:  # with 0, a step would make NaN of the zeros between fragments
            spans = joined(spans, state)
        params = [state.params_shard[b:e] for b, e in spans]
    else:  # the parameters themselves, which may differ in dtype
        spans = [fragment.shard_range for fragment in fragments]
        params = [own_part(optimizer, fragment) for fragment in fragments]
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for index, param in enumerate(params):
        by_dtype[param.dtype].append(index)
    for indices in by_dtype.values():
        own, where = [params[i] for i in indices], [spans[i] for i in indices]
        _step_spans(optimizer, state, grads, new, own, where, numbers)


def _step_spans(
    optimizer: Any,
    state: StateBucket,
    grads: Tensor,
    new: Tensor,
    own: list[Tensor],
    spans: list[tuple[int, int]],
    numbers: dict[str, Any],
) -> None:
    """Step parameters of one dtype, which lie at ``spans`` of their shard.

    Values of float64 parameters are no more exact than what ranks exchange: they are stepped as
    float32 and copied back, and so are float64 copies.
    """
    copies, targets = [new[b:e] for b, e in spans], []
    if own[0].dtype == torch.float64:
        targets, own = own, [param.float() for param in own]
    written = list(zip(targets, own, strict=False))
    if new.dtype == torch.float64:
        written += zip(copies, own, strict=True)
        copies = []
    elif own[0].data_ptr() == copies[0].data_ptr():
        copies = []
    elif optimizer.capturable:  # a step that the device leaves out writes no copies
        torch._foreach_copy_(copies, own)
    rests = state.param_remainders_shard
    call_counted(
        distributed_adam_step,
        own,
        [grads[b:e] for b, e in spans],
        [state.exp_avg_shard[b:e] for b, e in spans],
        [state.exp_avg_sq_shard[b:e] for b, e in spans],
        [] if rests is None else [rests[b:e] for b, e in spans],
        copies,
        None,
        None,
        *numbers["device"],
        numbers["found_inf"],
        *numbers["host"],
    )
    for target, values in written:
        target.copy_(values)


def step_scaled(
    state: StateBucket,
    grads: Tensor,
    new: Tensor,
    fragments: list[ParameterFragment],
    rows: list[int],
    numbers: dict[str, Any],
) -> None:
    """The step of states with scales: first their new magnitudes, then new scales and values."""
    spans = [fragment.shard_range for fragment in fragments]

    def parts(shard: Tensor) -> list[Tensor]:
        return [shard[b:e] for b, e in spans]

    shards = (state.params_shard, grads, state.exp_avg_shard, state.exp_avg_sq_shard)
    lists = list(map(parts, shards))
    all_scales = scaling.scales_of(state)
    scales = all_scales[rows].contiguous()
    peaks = distributed_adam_peaks(*lists, scales, *numbers["device"], *numbers["host"])
    new_scales = scaling.scales_for(peaks, state.dtype)
    call_counted(
        distributed_adam_step,
        *lists,
        [],
        parts(new),
        scales,
        new_scales,
        *numbers["device"],
        numbers["found_inf"],
        *numbers["host"],
    )
    all_scales[rows] = new_scales


def own_part(optimizer: Any, fragment: ParameterFragment) -> Tensor:
    """This rank's part of a fragment, in the parameter itself."""
    return flat_view(optimizer.parameter(fragment))[slice(*fragment.shard_param_range)]


def joined(spans: list[Span], bucket: StateBucket) -> list[Span]:
    """Parts of a shard, neighbours as one, with the elements between them, which are zero.

    Less than the alignment lies between neighbours. Where there is more, there may be another
    parameter, which is frozen or in another group.
    """
    alignment = planner.ALIGNMENT_BYTES // bucket.grad_sync_dtype.itemsize
    result: list[Span] = []
    for begin, end in sorted(spans):
        if result and 0 <= begin - result[-1][1] < alignment:
            result[-1] = (result[-1][0], end)
        else:
            result.append((begin, end))
    return result


def numbers_of(optimizer: Any, group: dict[str, Any], count: Any) -> dict[str, Any]:
    """The arguments of the operator that are numbers, on the device and on the host."""
    lr, device_lr, device_step = group["lr"], None, None
    if optimizer.capturable:
        device_step, count = count, 1
        if isinstance(lr, Tensor):
            device_lr, lr = lr.to(optimizer.device, torch.float32), 0.0
    return {
        "device": (device_lr, device_step, optimizer._grad_scale),
        "found_inf": optimizer.found_inf if optimizer.capturable else None,
        "host": (
            float(lr),
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            count,
            bool(group["bias_correction"]),
            bool(optimizer.adam_w_mode),
        ),
    }
