"""Puts parameters into buckets, in an order that all ranks agree on."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import planner
from .arguments import NAME, check_dtypes
from .collectives import check_alike
from .layout import Dtypes, Range, StateBucket, flat_view, make_fragment, memory_order

_WELL_FILLED = 0.7  # part of the buckets


class Piece(NamedTuple):
    """A part of a parameter that a bucket will hold."""

    bucket_id: int
    bucket_size: int | None  # of a bucket that is still to be made
    param_range: Range
    bucket_start: int


class Planned(NamedTuple):
    """A parameter and the pieces that it will be cut into, if it comes with these dtypes."""

    param: Tensor
    pieces: list[Piece]
    dtypes: Dtypes


def trainable(optimizer: Any) -> list[Tensor]:
    """The parameters that require gradients."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def agree(optimizer: Any) -> None:
    """Give buckets to all parameters that lack them, in rank 0's order; a collective call.

    That is the order in which their gradients arrived. Those whose gradients did not arrive come
    last, from the end of the model to its begin.

    Raises:
        RuntimeError: the ranks' parameters, arguments or buckets differ.
    """
    missing = [p for p in trainable(optimizer) if id(p) not in optimizer.fragments]
    if optimizer.plan_is_agreed and not missing:
        return
    groups, device = optimizer.groups, optimizer.device
    ids = [optimizer.position_of(param) for param in missing]
    facts = [
        (i, tuple(p.shape), p.dtype, memory_order(p)) for i, p in zip(ids, missing, strict=True)
    ]
    plan = [(b.dtypes(), b.bucket_size, b.fragments) for b in optimizer.state["buckets"]]
    where = [[(f.bucket_range, f.param_range) for f in fragments] for *_, fragments in plan]
    options = {k: v for k, v in optimizer.args_dict.items() if "group" not in k and k != "lr"}
    options = {k: v for k, v in options.items() if k not in ("module", "device")}
    known = (facts, [entry[:2] for entry in plan], where, options)
    check_alike(known, "parameters, arguments or buckets", groups, device, NAME)
    if missing:
        arrived = {key: rank for rank, key in enumerate(optimizer.arrivals)}
        last = len(arrived) + len(missing)
        key = [arrived.get(id(p), last - at) for at, p in enumerate(missing)]
        order = torch.tensor(sorted(range(len(missing)), key=key.__getitem__), device=device)
        if groups.size > 1:
            dist.broadcast(order, groups.root, groups.all)
        optimizer.init_params([missing[at] for at in order.tolist()])
    optimizer.arrivals.clear()
    optimizer.plan_is_agreed = True


def init_params(
    optimizer: Any,
    params: Tensor | Iterable[Tensor] | None = None,
    dtype: torch.dtype | None = None,
    grad_sync_dtype: torch.dtype | None = None,
    param_sync_dtype: torch.dtype | None = None,
) -> None:
    """Give buckets to parameters that have none; all ranks in the same order.

    Args:
        params: by default all that require gradients, from the model's end to its begin, which
            is about the order of their gradients. Those of others are ignored.
        dtype: the constructor's or None.
        grad_sync_dtype, param_sync_dtype: instead of the constructor's.

    Raises:
        ValueError: ``dtype`` is another, or gradients cannot be sent so.
    """
    if params is None:
        params = reversed(trainable(optimizer))
    elif isinstance(params, Tensor):
        params = [params]
    # By name, because NeMo's methods in place of these take them so.
    dtypes = _by_name(dtype, grad_sync_dtype, param_sync_dtype)
    resolved = resolve_dtypes(optimizer, **dtypes)
    new = [p for p in params if optimizer.owns(p) and "fragments" not in optimizer.state[p]]
    if len(new) > 1:  # one parameter alone may be the first of many
        plan_ahead(optimizer, new, resolved, is_all=True)
    for param in new:
        optimizer._init_param_state(param, *optimizer.position_of(param), **dtypes)
    optimizer.planned.clear()
    if new:
        warn_of_empty_buckets(optimizer)


def init_params_bucket(
    optimizer: Any,
    params: Tensor | Iterable[Tensor],
    dtype: torch.dtype | None = None,
    grad_sync_dtype: torch.dtype | None = None,
    param_sync_dtype: torch.dtype | None = None,
) -> None:
    """Give parameters buckets of their own, which are sent when all of them are there."""
    params = [params] if isinstance(params, Tensor) else list(params)
    for bucket in optimizer.state["buckets"]:
        bucket.able_to_fill = False
    new = [p for p in params if optimizer.owns(p) and "fragments" not in optimizer.state[p]]
    optimizer.init_params(new, **_by_name(dtype, grad_sync_dtype, param_sync_dtype))
    close_buckets(optimizer, new)


def _by_name(*dtypes: torch.dtype | None) -> dict[str, torch.dtype | None]:
    return dict(zip(("dtype", "grad_sync_dtype", "param_sync_dtype"), dtypes, strict=True))


def warn_of_empty_buckets(optimizer: Any) -> None:
    """Say so where little is in buckets of ``bucket_cap_mb``, once all parameters are in them."""
    if any(id(param) not in optimizer.fragments for param in trainable(optimizer)):
        return
    filled, room = 0, 0
    for bucket in optimizer.state["buckets"]:
        filled += bucket.filled_size
        room += max(bucket.bucket_size, bucket_shape(optimizer, bucket.dtypes()).bucket_size)
    if filled < _WELL_FILLED * room:
        warnings.warn(
            f"Only {filled / room:.1%} of buckets are used. Consider decreasing the bucket_cap_mb "
            "argument.",
            stacklevel=3,
        )


def bucket_shape(optimizer: Any, dtypes: Dtypes) -> planner.BucketShape:
    """The size of new buckets of some dtypes, if they are not the last."""
    cap = int(optimizer.bucket_cap_mb * 2**20)
    return planner.bucket_shape(cap, dtypes[1].itemsize, optimizer.distributed_size)


def plan_ahead(optimizer: Any, params: Sequence[Tensor], dtypes: Dtypes, is_all: bool) -> None:
    """Plan for parameters that are about to get buckets, in this order and with these dtypes."""
    shape = bucket_shape(optimizer, dtypes)
    buckets = optimizer.state["buckets"]
    fitting = (i for i, b in enumerate(buckets) if b.able_to_fill and b.dtypes() == dtypes)
    open_id = max(fitting, default=None)
    opened = None
    if open_id is not None:
        opened = buckets[open_id].filled_size, buckets[open_id].bucket_size
    plan = planner.plan([param.numel() for param in params], opened, shape, is_all)
    pieces: list[list[Piece]] = [[] for _ in params]
    columns = (plan.param, plan.bucket, plan.param_start, plan.numel, plan.bucket_start)
    for index, bucket, begin, numel, start in zip(*(c.tolist() for c in columns), strict=True):
        where = open_id if bucket == 0 else len(buckets) + bucket - 1
        size = None if bucket == 0 else plan.new_sizes[bucket - 1]
        pieces[index].append(Piece(where, size, (begin, begin + numel), start))
    optimizer.planned = deque(Planned(*each, dtypes) for each in zip(params, pieces, strict=True))


def resolve_dtypes(
    optimizer: Any,
    dtype: torch.dtype | None,
    grad_sync_dtype: torch.dtype | None,
    param_sync_dtype: torch.dtype | None,
) -> Dtypes:
    """The dtypes of a bucket, from arguments of which None is the constructor's.

    Raises:
        ValueError: ``dtype`` is not the constructor's, or one of the others cannot be sent.
        RuntimeError: remainders, and parameters are not sent in bfloat16.
    """
    if dtype not in (None, optimizer.dtype):
        raise ValueError(
            f"{NAME}: dtype must be {optimizer.dtype}, the constructor's, got {dtype}."
        )
    grads = grad_sync_dtype or optimizer.grad_sync_dtype
    params = param_sync_dtype or optimizer.param_sync_dtype
    check_dtypes(optimizer.dtype, grads, params)
    if optimizer.store_param_remainders and params != torch.bfloat16:
        raise RuntimeError(
            f"{NAME}: with store_param_remainders, param_sync_dtype must be bfloat16, got {params}."
        )
    return optimizer.dtype, grads, params


def init_param_state(
    optimizer: Any,
    param: Tensor,
    param_group_id: int,
    param_id: int,
    dtype: torch.dtype | None = None,
    grad_sync_dtype: torch.dtype | None = None,
    param_sync_dtype: torch.dtype | None = None,
) -> None:
    """Give buckets to one parameter, if it has none, and take its value into this rank's shards."""
    if "fragments" in optimizer.state[param]:
        return
    dtypes = resolve_dtypes(optimizer, dtype, grad_sync_dtype, param_sync_dtype)
    if optimizer.store_param_remainders and param.dtype != torch.bfloat16:
        raise RuntimeError(
            f"{NAME}: store_param_remainders=True is for bfloat16 parameters, got a parameter of "
            f"{param.dtype}. Put others into an optimizer of their own."
        )
    head = optimizer.planned[0] if optimizer.planned else None
    if head is None or head.param is not param or head.dtypes != dtypes:
        plan_ahead(optimizer, [param], dtypes, is_all=False)  # what was planned does not hold
    buckets, fragments = optimizer.state["buckets"], []
    for piece in optimizer.planned.popleft().pieces:
        if piece.bucket_id == len(buckets):
            buckets.append(new_bucket(optimizer, piece.bucket_size, dtypes))
        bucket = buckets[piece.bucket_id]
        begin = bucket.shard_size * optimizer.distributed_rank
        fragment = make_fragment(
            (param_group_id, param_id, piece.bucket_id),
            piece.param_range,
            piece.bucket_start,
            (begin, begin + bucket.shard_size),
        )
        bucket.fragments.append(fragment)
        bucket.filled_size = fragment.bucket_range[1]
        fragments.append(fragment)
    optimizer.state[param]["fragments"] = optimizer.fragments[id(param)] = fragments
    optimizer.plan_is_agreed = False
    if optimizer.store_params:
        from .held_values import write_all  # which needs this module

        write_all(optimizer, param, "param", flat_view(param))


def new_bucket(optimizer: Any, size: int, dtypes: Dtypes) -> StateBucket:
    """An empty bucket of ``size`` elements, in place of the open one of its dtypes.

    In buffers it comes behind those of its dtypes.
    """
    buckets = optimizer.state["buckets"]
    before = next((bucket for bucket in reversed(buckets) if bucket.dtypes() == dtypes), None)
    offset = 0
    if before is not None:
        before.able_to_fill = False
        offset = before.contiguous_buffer_offset + before.bucket_size
    dtype, grads, params = dtypes
    return StateBucket(
        size,
        size // optimizer.distributed_size,
        dtype,
        optimizer.device,
        grads,
        params,
        offset,
        optimizer.store_params,
        optimizer.store_param_remainders,
    )


def close_buckets(optimizer: Any, params: Sequence[Tensor]) -> None:
    """Have the buckets of ``params`` wait for all of them, and let nothing else into them."""
    buckets = optimizer.state["buckets"]
    ids = sorted({f.bucket_id for p in params for f in optimizer.state[p]["fragments"]})
    for param in params:
        fragments = optimizer.state[param]["fragments"]
        where = optimizer.position_of(param)
        for bucket_id in set(ids) - {fragment.bucket_id for fragment in fragments}:
            end = buckets[bucket_id].filled_size
            numel = param.numel()
            fragment = make_fragment((*where, bucket_id), (numel, numel), end, (0, 0))
            buckets[bucket_id].fragments.append(fragment)
            fragments.append(fragment)
    for bucket_id in ids:
        buckets[bucket_id].able_to_fill = False
