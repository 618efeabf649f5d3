"""From new shards to whole parameters on every rank."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import NAME, check_group
from .collectives import all_gather, join_stream, on_stream
from .layout import ParameterFragment, ParameterStatus, flat_view, shaped_view
from .norms import has_overflow
from .ownership import check_owner
from .step import step_bucket


def step(optimizer: Any, grad_scaler: Any) -> None:
    """Take a step with whatever gradients there are, unless they are not finite."""
    check_owner(optimizer, "step")
    for group in optimizer.param_groups:
        check_group(group)
    optimizer.param_sync()
    optimizer.grad_sync()
    optimizer.is_stepped = True
    if has_overflow(optimizer, grad_scaler):
        return
    optimizer.late.clear()
    count = optimizer.state["step"]
    if optimizer.capturable:
        count += (optimizer.found_inf == 0).int()
    else:
        count += 1
    step_and_gather(optimizer, count)
    optimizer.state["step"] = count


def step_and_gather(optimizer: Any, count: Any) -> None:
    """Step every bucket and send it to all ranks, while the next one is stepped."""
    under_way: deque[int] = deque()
    bucket_ids = range(len(optimizer.state["buckets"]))
    if optimizer.overlap_param_sync:
        bucket_ids = reversed(bucket_ids)  # the model's begin is in the last ones
    for bucket_id in bucket_ids:
        bucket = step_bucket(optimizer, bucket_id, count)
        optimizer._params_buckets[bucket_id] = bucket
        optimizer._check_params_shard_dtypes({bucket_id: bucket})
        start_gather(optimizer, bucket_id)
        under_way.append(bucket_id)
        if not optimizer.overlap_param_sync and len(under_way) > optimizer.pipeline_size:
            finish_gather(optimizer, under_way.popleft())
    if not optimizer.overlap_param_sync:
        optimizer.param_sync()


def start_gather(optimizer: Any, bucket_id: int) -> None:
    """Start to send this rank's shard of a bucket to the others."""
    bucket, state = optimizer._params_buckets[bucket_id], optimizer.state["buckets"][bucket_id]
    if bucket.params_bucket is None and optimizer.distributed_size == 1:
        bucket.params_bucket = bucket.params_shard
    if bucket.params_bucket is None:
        bucket.params_bucket = torch.empty(
            state.bucket_size, dtype=state.param_sync_dtype, device=state.device
        )
    with on_stream(optimizer, bucket_id, bucket.params_bucket, bucket.params_shard):
        bucket.sync_request = all_gather(
            bucket.params_bucket, bucket.params_shard, optimizer.groups
        )
    bucket.status = ParameterStatus.SYNCING


def wait_for_gather(optimizer: Any, bucket_id: int) -> None:
    """Have all ranks' values of a bucket."""
    bucket = optimizer._params_buckets[bucket_id]
    if bucket.status is ParameterStatus.SYNCING:
        with on_stream(optimizer, bucket_id):
            if bucket.sync_request is not None:
                bucket.sync_request.wait()
        join_stream(optimizer, bucket_id, bucket.params_bucket)
        bucket.sync_request, bucket.status = None, ParameterStatus.READY


def finish_gather(optimizer: Any, bucket_id: int) -> None:
    """Copy a whole bucket into its parameters, and let it go."""
    wait_for_gather(optimizer, bucket_id)
    bucket = optimizer._params_buckets[bucket_id]
    every, updated = optimizer.state["buckets"][bucket_id].fragments, bucket.params_updated
    fragments = [f for f in every if ids_of(f) not in updated] if updated else every
    optimizer._param_copy_fragments(fragments)
    del optimizer._params_buckets[bucket_id]


def finish_parameters(optimizer: Any, params: Iterable[Tensor]) -> None:
    """Have the new values of some parameters, and leave the others under way."""
    states = [optimizer.state[param] for param in params if param in optimizer.state]
    fragments = (f for state in states for f in state.get("fragments", ()))
    waiting = [f for f in fragments if is_waiting(optimizer, f)]
    bucket_ids = list(dict.fromkeys(f.bucket_id for f in waiting))
    for bucket_id in bucket_ids:
        wait_for_gather(optimizer, bucket_id)
    optimizer._param_copy_fragments(waiting)
    buckets = optimizer._params_buckets
    for fragment in waiting:
        buckets[fragment.bucket_id].params_updated.add(ids_of(fragment))
    for bucket_id in bucket_ids:
        bucket = buckets[bucket_id]
        if bucket.params_held is None:
            bucket.params_held = set(map(ids_of, optimizer.state["buckets"][bucket_id].fragments))
        if len(bucket.params_updated) == len(bucket.params_held):
            del buckets[bucket_id]


def ids_of(fragment: ParameterFragment) -> tuple[int, int]:
    """Ids of its group and of its parameter."""
    return fragment.param_group_id, fragment.param_id


def is_waiting(optimizer: Any, fragment: ParameterFragment) -> bool:
    """Whether new values of a fragment have not reached its parameter."""
    bucket = optimizer._params_buckets.get(fragment.bucket_id)
    return bucket is not None and ids_of(fragment) not in bucket.params_updated


def param_sync(optimizer: Any) -> None:
    """Have all new parameters arrive."""
    for bucket_id in list(optimizer._params_buckets):
        finish_gather(optimizer, bucket_id)


def check_was_current(optimizer: Any, param: Tensor) -> None:
    """Raise RuntimeError if ``param`` was used before its new value had arrived."""
    fragments = optimizer.state[param]["fragments"] if optimizer._params_buckets else ()
    if id(param) in optimizer.late or any(is_waiting(optimizer, f) for f in fragments):
        raise RuntimeError(
            f"{NAME}: a parameter of shape {list(param.shape)} got a gradient, but its value of "
            "the last step had not arrived when the model used it. With overlap_param_sync, "
            "parameters arrive when the forward of their own submodule begins; call "
            "optimizer.param_sync() before a forward that uses them otherwise."
        )


@torch.no_grad()
def copy_fragments(optimizer: Any, fragments: Iterable[ParameterFragment]) -> None:
    """Copy fragments of whole buckets into their parameters, unless those are views of them."""
    sources, targets, groups = [], [], optimizer.param_groups
    has_views = bool(optimizer._param_buffers)
    for fragment in fragments:
        begin, end = fragment.param_range
        bucket_id = fragment.bucket_id
        bucket = optimizer._params_buckets.get(bucket_id)
        if begin == end or bucket is None:
            continue
        param = groups[fragment.param_group_id]["params"][fragment.param_id]
        if not bucket.slots:
            bucket.slots, _ = optimizer.state["buckets"][bucket_id].cut(bucket.params_bucket)
        source, target = bucket.slots[fragment.bucket_range[0]], param
        is_whole = end - begin == param.numel() and param.is_contiguous()
        if not is_whole:
            target = flat_view(param)[begin:end]
        if has_views and source.data_ptr() == target.data_ptr():
            continue
        if not source.is_floating_point():
            source = leading_bytes(source, param.dtype)
        if is_whole and param.dim() != 1:
            source = source.view(param.shape)
        sources.append(source)
        targets.append(target)
    copy_all(sources, targets)


def copy_all(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copy lists of tensors, in as few launches as torch can."""
    if targets:
        torch._foreach_copy_(targets, sources)


def leading_bytes(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The most significant bytes of 1-D ``values`` as those of another dtype; missing ones are 0.

    From floating point to the integers that are sent, and back.
    """
    kept = min(dtype.itemsize, values.element_size())
    raw = values.contiguous().view(torch.uint8).view(-1, values.element_size())
    out = torch.zeros(values.numel(), dtype.itemsize, dtype=torch.uint8, device=values.device)
    out[:, -kept:] = raw[:, -kept:]
    return out.view(dtype).view(-1)


@torch.no_grad()
def check_shard_dtypes(optimizer: Any, params_buckets: dict[int, Any]) -> None:
    """Bring new shards into the dtype in which they are sent."""
    for bucket_id, bucket in params_buckets.items():
        state = optimizer.state["buckets"][bucket_id]
        shard, sync = bucket.params_shard, state.param_sync_dtype
        if shard.dtype == sync:
            continue
        if sync.is_floating_point:
            bucket.params_shard = shard.to(sync)
            continue
        sent = torch.zeros(shard.numel(), dtype=sync, device=shard.device)
        for fragment in state.local_fragments():
            part = slice(*fragment.shard_range)
            values = shard[part].to(optimizer.parameter(fragment).dtype)
            sent[part] = leading_bytes(values, sync)
        bucket.params_shard = sent


@torch.no_grad()
def init_param_buffer(optimizer: Any) -> None:
    """Make all parameters views of flat buffers, in which they are received.

    Raises:
        RuntimeError: a parameter is of another dtype than it is sent in, and those are no integers
            of its size. Nothing has changed then.
    """
    optimizer.contiguous_param_buffer = True
    optimizer.init_params()
    sizes: dict[Any, int] = {}
    for bucket in optimizer.state["buckets"]:
        end = bucket.contiguous_buffer_offset + bucket.bucket_size
        sizes[bucket.dtypes()] = max(sizes.get(bucket.dtypes(), 0), end)
    params = [p for p in optimizer.parameters() if optimizer.state[p].get("fragments")]
    for param in params:
        first = optimizer.state[param]["fragments"][0]
        wanted = optimizer.state["buckets"][first.bucket_id].param_sync_dtype
        has_bytes = not wanted.is_floating_point and wanted.itemsize == param.dtype.itemsize
        if param.dtype != wanted and not has_bytes:
            raise RuntimeError(
                f"{NAME}: a contiguous parameter buffer of {wanted} (param_sync_dtype) cannot hold "
                f"a parameter of {param.dtype}. Pass param_sync_dtype={param.dtype}."
            )
    buffers = {
        dtypes: torch.zeros(size, dtype=dtypes[2], device=optimizer.device)
        for dtypes, size in sizes.items()
    }
    for param in params:
        first = optimizer.state[param]["fragments"][0]
        bucket = optimizer.state["buckets"][first.bucket_id]
        begin = bucket.contiguous_buffer_offset + first.bucket_range[0]
        flat = buffers[bucket.dtypes()].view(param.dtype)[begin : begin + param.numel()]
        flat.copy_(flat_view(param))
        param.data = shaped_view(param, flat)
    optimizer._param_buffers.update(buffers)


def watch_module(optimizer: Any, module: nn.Module) -> None:
    """Have the parameters of each submodule of ``module`` when its forward begins.

    A submodule whose forward was never called, such as the output projection of
    torch.nn.MultiheadAttention, is used by the one that it belongs to, and arrives with that.
    """
    owner = weakref.ref(optimizer)
    called: set[nn.Module] = set()

    def before(submodule: nn.Module, _: Any) -> None:
        called.add(submodule)
        optimizer = owner()
        if optimizer is None or not (optimizer._params_buckets or optimizer.late):
            return
        params = list(used_by(submodule, called))
        optimizer.late.difference_update(map(id, params))  # from now on they are current
        finish_parameters(optimizer, params)

    def after(*_: Any) -> None:
        optimizer = owner()
        if optimizer is not None and optimizer._params_buckets:
            # Whoever used these past their module has seen old values: backward will say so.
            buckets = [optimizer.state["buckets"][i] for i in optimizer._params_buckets]
            waiting = [f for b in buckets for f in b.fragments if is_waiting(optimizer, f)]
            late = {id(optimizer.parameter(f)) for f in waiting}
            optimizer.param_sync()
            optimizer.late.update(late)

    for submodule in module.modules():
        if next(submodule.parameters(), None) is not None:
            submodule.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def used_by(module: nn.Module, called: set[nn.Module]) -> Iterator[Tensor]:
    """The module's own parameters, and those of submodules that are not in ``called``."""
    yield from (param for param in module._parameters.values() if param is not None)
    for child in module.children():
        if child not in called:
            yield from used_by(child, called)
