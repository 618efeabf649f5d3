"""From gradients to reduced shards: hooks, copies into buckets, and reductions in bucket order.

All ranks reduce all buckets in the same order, in rounds: one for each backward pass that is not
under ``no_sync``. A bucket leaves during the pass when all its gradients have arrived and the
buckets before it have left. The end of the pass sends the others, with zeros for gradients that
did not arrive, so ranks may use different parameters.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward

from .arguments import NAME
from .buffers import slots_of, zero_gradients, zero_rest
from .collectives import Reduction, join_stream, on_stream
from .layout import GradientBucket, GradientStatus, flat_like
from .ownership import check_owner, check_sole_reducer
from .plans import agree, trainable

_PLACE, _DRAWBACKS = attrgetter("bucket_range"), attrgetter("layout", "requires_grad")


def make_hook(
    optimizer: Any, param: Tensor, param_group_id: int, param_id: int
) -> Callable[..., None]:
    """What a parameter calls when autograd has added to its gradient."""
    owner, key = weakref.ref(optimizer), id(param)

    def hook(*unused: Any) -> None:
        optimizer = owner()
        if optimizer is None or not param.requires_grad or param.grad is None:
            return
        with optimizer._lock:
            optimizer.note_gradients()
            optimizer.taken.discard(key)
            if key not in optimizer.fragments:
                optimizer.arrivals.setdefault(key)
                return
            if optimizer._params_buckets or optimizer.late:
                optimizer.check_was_current(param)
            if optimizer.greedy_grad_copy and not note_arrival(optimizer, param):
                copy_gradient(optimizer, param)
                if optimizer.overlap_grad_sync:
                    try_start(optimizer, (param,))

    return hook


def note_arrival(optimizer: Any, param: Tensor) -> bool:
    """Leave a gradient where it is until its bucket leaves; False where it must be copied now.

    One loop over a bucket takes a third of the time of a copy in each hook. Only within a pass
    whose end is known, because another pass would add to the gradient.
    """
    fragments = optimizer.fragments[id(param)]
    if len(fragments) != 1 or not optimizer.overlap_grad_sync or optimizer.contiguous_grad_buffer:
        return False
    if optimizer.round.expected is None and optimizer.plan_is_agreed:
        begin_round(optimizer, arriving=param)
    current, fragment = optimizer.round, fragments[0]
    bucket = optimizer.grads_buckets[fragment.bucket_id]
    if not current.ends_with_backward or fragment in bucket.grads_generated:
        return False
    bucket.grads_generated.add(fragment)
    bucket.arrived.append(fragment)
    if len(bucket.grads_generated) == current.expected[fragment.bucket_id]:
        try_start(optimizer)
    return True


def _as_row(grad: Tensor, param: Tensor) -> Tensor | None:
    """A gradient as one row in the parameter's order; None where it takes more than a view."""
    if _DRAWBACKS(grad) != (torch.strided, False):
        return None
    if not (grad.is_contiguous() and param.is_contiguous()):
        return None
    return grad if grad.dim() == 1 else grad.view(-1)


def take_arrived(optimizer: Any, bucket: GradientBucket) -> None:
    """Take the gradients that :func:`note_arrival` has left."""
    groups, slots = optimizer.param_groups, bucket.slots
    written, copies = bucket.written, bucket.copies
    for fragment in bucket.arrived:
        param = groups[fragment.param_group_id]["params"][fragment.param_id]
        grad, place = param.grad, fragment.bucket_range[0]
        if grad is None:
            continue
        row = _as_row(grad, param)
        if row is None or place in written or not row.numel():
            copy_gradient(optimizer, param)
            continue
        copies.append((slots[place], row))
        written.add(place)
        optimizer.taken.add(id(param))
        param.grad = None
    bucket.arrived.clear()


def join_arrived(optimizer: Any, bucket_id: int) -> bool:
    """Make a bucket of the gradients that :func:`note_arrival` has left, in one call.

    Where they are all that it will hold, and lie in memory as it does; False where not.
    """
    bucket, state = optimizer.grads_buckets[bucket_id], optimizer.state["buckets"][bucket_id]
    if bucket.grads_bucket is not None or len(bucket.arrived) < len(state.fragments):
        return False
    groups, dtype = optimizer.param_groups, state.grad_sync_dtype
    params, parts, at = [], [], 0
    for fragment in sorted(bucket.arrived, key=_PLACE):
        param = groups[fragment.param_group_id]["params"][fragment.param_id]
        grad, (begin, end) = param.grad, fragment.bucket_range
        if grad is None or grad.dtype is not dtype or (row := _as_row(grad, param)) is None:
            return False
        if at < begin:
            parts.append(torch.zeros(begin - at, dtype=dtype, device=grad.device))
        params.append(param)
        parts.append(row)
        at = end
    if at < state.bucket_size:
        parts.append(torch.zeros(state.bucket_size - at, dtype=dtype, device=state.device))
    with torch.no_grad():
        bucket.grads_bucket = torch.cat(parts)
    for param in params:
        param.grad = None
    optimizer.taken.update(map(id, params))
    bucket.arrived.clear()
    return True


def copy_gradient(optimizer: Any, param: Tensor) -> None:
    """Add a parameter's gradient to its buckets, and take it from the parameter.

    Copies of one bucket are made together, as late as the bucket is needed.

    Raises:
        NotImplementedError: the gradient is sparse.
    """
    grad = param.grad
    if grad is None:
        return
    optimizer.note_gradients()
    if grad.layout != torch.strided:
        raise NotImplementedError(
            f"{NAME}: a parameter of shape {list(param.shape)} has a gradient of layout "
            f"{grad.layout}; only dense gradients can be sharded. Build embeddings with "
            "sparse=False."
        )
    if grad.requires_grad:
        grad = grad.detach()
    is_plain = grad.is_contiguous() and param.is_contiguous()
    flat = grad.view(-1) if is_plain else flat_like(param, grad)
    in_place = False
    for fragment in optimizer.fragments[id(param)]:
        begin, end = fragment.param_range
        if begin == end:
            continue
        bucket = optimizer.grads_buckets[fragment.bucket_id]
        if bucket.status is GradientStatus.SYNCING:
            finish_bucket(optimizer, fragment.bucket_id)
        place = fragment.bucket_range[0]
        slot = slots_of(optimizer, fragment.bucket_id)[place]
        part = flat if end - begin == flat.numel() else flat[begin:end]
        if slot.data_ptr() == part.data_ptr():
            in_place = True
        elif place in bucket.written or optimizer.contiguous_grad_buffer:
            if place in bucket.adding:
                flush(bucket)  # a slot may not stand in a list twice
            bucket.adding.add(place)
            bucket.additions.append((slot, part))
        else:
            bucket.copies.append((slot, part))
        bucket.written.add(place)
        if len(bucket.copies) + len(bucket.additions) == len(bucket.slots):
            flush(bucket)
    optimizer.taken.add(id(param))
    if not in_place:
        param.grad = None


def flush(bucket: GradientBucket) -> None:
    """Make the copies that were put off."""
    for pairs, operation in (
        (bucket.copies, torch._foreach_copy_),
        (bucket.additions, torch._foreach_add_),
    ):
        if pairs:
            targets, sources = map(list, zip(*pairs, strict=True))
            with torch.no_grad():
                operation(targets, sources)
            pairs.clear()
    bucket.adding.clear()


def try_start(
    optimizer: Any, params: Iterable[Tensor] | None = None, ignore_last_bucket: bool = False
) -> None:
    """Note that gradients of ``params`` are in buckets, and reduce the buckets that may leave."""
    last = len(optimizer.state["buckets"]) - 1 if ignore_last_bucket else None
    if not optimizer.plan_is_agreed:
        return
    for param in params or ():
        for fragment in optimizer.fragments[id(param)]:
            bucket = optimizer.grads_buckets[fragment.bucket_id]
            if fragment in bucket.grads_generated:  # another pass has begun
                finish_round(optimizer)
            bucket.grads_generated.add(fragment)
            bucket.status = GradientStatus.PARTIALLY_FILLED
    if optimizer.round.expected is None:
        begin_round(optimizer)
    current = optimizer.round
    if current.expected is None:
        return
    if optimizer.contiguous_grad_buffer and not current.ends_with_backward:
        return  # autograd would write where a reduction still reads
    while current.next < len(current.expected):
        bucket = optimizer.grads_buckets[current.next]
        if current.next == last or len(bucket.grads_generated) < current.expected[current.next]:
            return
        bucket.status = GradientStatus.FULLY_FILLED
        start_bucket(optimizer, current.next)
        current.next += 1


class Round:
    """How far the reductions of the current backward pass are.

    Attributes:
        expected: how many fragments of each bucket will get gradients; None before the pass.
        next: the bucket that leaves next.
        ends_with_backward: whether the engine calls :func:`finish_round` at the end of the pass.
    """

    def __init__(self) -> None:
        self.expected: list[int] | None = None
        self.next = 0
        self.ends_with_backward = False


def begin_round(optimizer: Any, arriving: Tensor | None = None) -> None:
    """Count what will come, and have the engine call back at the end of the pass.

    Not where a parameter has no buckets yet: all ranks must agree first, after the pass.

    Args:
        arriving: the parameter whose gradient has just come.
    """
    current = optimizer.round = Round()
    params = trainable(optimizer)
    fragments = [optimizer.fragments.get(id(param)) for param in params]
    if None in fragments:
        optimizer.plan_is_agreed = False
        return
    current.expected = [0] * len(optimizer.state["buckets"])
    for fragment in chain.from_iterable(fragments):
        current.expected[fragment.bucket_id] += 1
    for param in params:
        if param.grad is None or param is arriving:
            continue
        # Left by passes under no_sync. This rank alone may have it, so it goes with this round.
        # NeMo sets that attribute, and copies it.
        if not getattr(param, "_disable_greedy_grad_copy", False):
            copy_if_new(optimizer, param)
    if in_nested_backward():
        return
    owner = weakref.ref(optimizer)

    def end() -> None:
        optimizer = owner()
        if optimizer is not None and optimizer.round is current:
            with optimizer._lock:
                finish_round(optimizer)
                if optimizer.contiguous_grad_buffer:
                    finish_all(optimizer)

    try:
        Variable._execution_engine.queue_callback(end)
        current.ends_with_backward = True
    except RuntimeError:
        return  # a call by the user, after backward: grad_sync() will finish the round


def in_nested_backward() -> bool:
    """Whether a backward runs in another one, as reentrant checkpoints do.

    The engine would then call back at the end of the inner one.
    """
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth += frame.f_code is _engine_run_backward.__code__
        frame = frame.f_back
    # Threads of the engine, which work for GPUs, have no frame of the outermost backward.
    of_engine = isinstance(threading.current_thread(), threading._DummyThread)
    return depth > (0 if of_engine else 1)


def finish_round(optimizer: Any) -> None:
    """Reduce the buckets that have not left yet."""
    buckets = optimizer.state["buckets"]
    for bucket_id in range(optimizer.round.next, len(buckets)):
        start_bucket(optimizer, bucket_id)
    optimizer.round = Round()
    optimizer.is_reduced, optimizer._grad_norm = True, None


def start_bucket(optimizer: Any, bucket_id: int) -> None:
    """Start the reduction of what a bucket holds; zeros where nothing has come."""
    bucket = optimizer.grads_buckets[bucket_id]
    if bucket.sync_request is not None:
        finish_bucket(optimizer, bucket_id)
    while len(optimizer.reducing) >= optimizer.pipeline_size:
        finish_bucket(optimizer, optimizer.reducing[0])
    if not join_arrived(optimizer, bucket_id):
        slots_of(optimizer, bucket_id)
        take_arrived(optimizer, bucket)
        flush(bucket)
    optimizer.reducing.append(bucket_id)
    with torch.no_grad(), on_stream(optimizer, bucket_id, bucket.grads_bucket):
        if not optimizer.contiguous_grad_buffer:  # which is zeroed as a whole
            zero_rest(bucket)
        bucket.sync_request = Reduction(
            bucket.grads_bucket, optimizer.groups, optimizer.average_grad_sync, optimizer.nccl_ub
        )
    bucket.status = GradientStatus.SYNCING
    bucket.grads_generated.clear()
    bucket.written.clear()


def finish_bucket(optimizer: Any, bucket_id: int) -> None:
    """Wait for a reduction, and add its result to what was reduced before."""
    bucket = optimizer.grads_buckets[bucket_id]
    with torch.no_grad(), on_stream(optimizer, bucket_id):
        shard = bucket.sync_request.wait()
        is_part = shard.numel() < bucket.grads_bucket.numel()
        leaves_bucket = is_part or optimizer.contiguous_grad_buffer
        if bucket.grads_shard is not None:
            bucket.grads_shard.add_(shard)
        elif leaves_bucket and not bucket.sync_request.has_own_memory:
            bucket.grads_shard = shard.clone()  # frees the bucket
        else:
            bucket.grads_shard = shard
        if optimizer.contiguous_grad_buffer:
            bucket.grads_bucket.zero_()
        else:
            bucket.grads_bucket, bucket.slots, bucket.gaps = None, {}, []
    join_stream(optimizer, bucket_id, bucket.grads_shard)
    bucket.sync_request, bucket.status = None, GradientStatus.READY
    optimizer.reducing.remove(bucket_id)


def zero_grad(optimizer: Any, set_to_none: bool = False) -> None:
    """Forget all gradients, reduced or not, and the pending scale."""
    check_owner(optimizer, "zero_grad")
    finish_all(optimizer)
    for bucket_id, buffer in optimizer._grad_buffers.items():
        if bucket_id in optimizer.grads_buckets:
            buffer.zero_()
    optimizer.grads_buckets.clear()
    optimizer.taken.clear()
    optimizer.round = Round()
    optimizer._grad_scale.fill_(1.0)
    optimizer.found_inf.zero_()
    optimizer._dummy_overflow_buf.zero_()
    optimizer.note_gradients()
    zero_gradients(optimizer, set_to_none)


def is_filled(bucket: GradientBucket) -> bool:
    """Whether a bucket holds gradients, in whatever state."""
    is_reduced = bucket.grads_shard is not None or bucket.sync_request is not None
    return is_reduced or bool(bucket.written or bucket.arrived)


def holds_gradients(optimizer: Any) -> bool:
    """Whether there are gradients that no step has used, outside of ``param.grad``."""
    return not optimizer.is_stepped and any(map(is_filled, optimizer.grads_buckets.values()))


def finish_all(optimizer: Any) -> None:
    """Wait for all reductions."""
    while optimizer.reducing:
        finish_bucket(optimizer, optimizer.reducing[0])


def grad_sync(optimizer: Any) -> None:
    """Have all gradients copied and reduced; a collective call."""
    check_owner(optimizer, "grad_sync")
    agree(optimizer)
    for param in trainable(optimizer):
        if param.grad is not None:
            copy_if_new(optimizer, param)
    if optimizer.round.next or not optimizer.is_reduced:
        finish_round(optimizer)
    finish_all(optimizer)
    optimizer.taken.clear()


def copy_if_new(optimizer: Any, param: Tensor) -> None:
    """Copy a gradient that is not in the optimizer's buckets."""
    if not is_own_view(optimizer, param):
        check_sole_reducer(optimizer, param)
        optimizer._grad_copy(param)


def is_own_view(optimizer: Any, param: Tensor) -> bool:
    """Whether the gradient is a view of a contiguous buffer, where it needs no copy."""
    fragments = optimizer.fragments[id(param)] if optimizer.contiguous_grad_buffer else ()
    if len(fragments) != 1:
        return False
    slot = slots_of(optimizer, fragments[0].bucket_id)[fragments[0].bucket_range[0]]
    return slot.data_ptr() == param.grad.data_ptr()
