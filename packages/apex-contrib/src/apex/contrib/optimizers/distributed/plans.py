"""Puts parameters into buckets, in an order that all ranks agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import planner
from .arguments import NAME, check_dtypes
from .collectives import check_alike
from .layout import Dtypes, StateBucket, flat_view, make_fragment, memory_order


def trainable(optimizer: Any) -> list[Tensor]:
    """The parameters that require gradients."""
    return [param for param in optimizer.parameters() if param.requires_grad]


def agree(optimizer: Any) -> None:
    """Give buckets to all parameters that lack them, in rank 0's order; a collective call.

    That is the order in which their gradients arrived. Those whose gradients did not arrive come
    last, from the end of the model to its begin.

    Raises:
        RuntimeError: the ranks' parameters, arguments or buckets differ.
    """
    missing = [p for p in trainable(optimizer) if "fragments" not in optimizer.state[p]]
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


def init_params(optimizer: Any, params: Any, dtypes: tuple[torch.dtype | None, ...]) -> None:
    """Give buckets to those of ``params`` that have none and are the optimizer's.

    Args:
        params: None stands for all that require gradients, from the model's end to its begin.
        dtypes: of state, gradients and parameters sent; None is the constructor's.
    """
    if params is None:
        params = reversed(trainable(optimizer))
    elif isinstance(params, Tensor):
        params = [params]
    names = ("dtype", "grad_sync_dtype", "param_sync_dtype")
    new = [p for p in params if optimizer.owns(p) and "fragments" not in optimizer.state[p]]
    alignment = planner.ALIGNMENT_BYTES // (dtypes[1] or optimizer.grad_sync_dtype).itemsize
    after = sum(planner.round_to_multiple(param.numel(), alignment) for param in new)
    for param in new:
        after -= planner.round_to_multiple(param.numel(), alignment)
        # One parameter alone may be the first of many.
        optimizer.numel_after = after if len(new) > 1 else None
        where = optimizer.position_of(param)
        optimizer._init_param_state(param, *where, **dict(zip(names, dtypes, strict=True)))
    optimizer.numel_after = None


def resolve_dtypes(
    optimizer: Any,
    dtype: torch.dtype | None,
    grad_sync_dtype: torch.dtype | None,
    param_sync_dtype: torch.dtype | None,
) -> Dtypes:
    """The dtypes of a bucket, from arguments of which None is the constructor's.

    Raises:
        ValueError: ``dtype`` is not the constructor's, or gradients cannot be sent so.
        RuntimeError: remainders or scaled states, and parameters cannot be sent so.
    """
    if dtype not in (None, optimizer.dtype):
        raise ValueError(
            f"{NAME}: dtype must be {optimizer.dtype}, the constructor's, got {dtype}."
        )
    grads = grad_sync_dtype or optimizer.grad_sync_dtype
    params = param_sync_dtype or optimizer.param_sync_dtype
    check_dtypes(optimizer.dtype, grads)
    if optimizer.store_param_remainders and params != torch.bfloat16:
        raise RuntimeError(
            f"{NAME}: with store_param_remainders, param_sync_dtype must be bfloat16, got {params}."
        )
    return optimizer.dtype, grads, params


def add_parameter(optimizer: Any, param: Tensor, where: tuple[int, int], dtypes: Dtypes) -> None:
    """Give buckets to a parameter, and take its value into this rank's shards."""
    fragments = []
    shape = planner.bucket_shape(
        int(optimizer.bucket_cap_mb * 2**20), dtypes[1].itemsize, optimizer.distributed_size
    )
    buckets = optimizer.state["buckets"]
    fitting = [i for i, b in enumerate(buckets) if b.able_to_fill and b.dtypes() == dtypes]
    ids = dict(enumerate(fitting[-1:]))
    opened = (buckets[ids[0]].filled_size, buckets[ids[0]].bucket_size) if ids else None
    if optimizer.store_param_remainders and param.dtype != torch.bfloat16:
        raise RuntimeError(
            f"{NAME}: store_param_remainders=True is for bfloat16 parameters, got a parameter of "
            f"{param.dtype}. Put others into an optimizer of their own."
        )
    for piece in planner.pieces(param.numel(), opened, shape, optimizer.numel_after):
        if piece.bucket not in ids:
            if ids:
                buckets[max(ids.values())].able_to_fill = False
            ids[piece.bucket] = len(buckets)
            buckets.append(new_bucket(optimizer, piece.bucket_size, dtypes))
        bucket = buckets[ids[piece.bucket]]
        shard = (
            bucket.shard_size * optimizer.distributed_rank,
            bucket.shard_size * (optimizer.distributed_rank + 1),
        )
        fragment = make_fragment(
            (*where, ids[piece.bucket]),
            (piece.param_start, piece.param_end),
            piece.bucket_start,
            shard,
        )
        bucket.fragments.append(fragment)
        bucket.filled_size = fragment.bucket_range[1]
        fragments.append(fragment)
    optimizer.state[param]["fragments"] = fragments
    optimizer.plan_is_agreed = False
    take_values(optimizer, param, flat_view(param))


def new_bucket(optimizer: Any, size: int, dtypes: Dtypes) -> StateBucket:
    """An empty bucket of ``size`` elements; in buffers it comes behind those of its dtypes."""
    before = [b for b in optimizer.state["buckets"] if b.dtypes() == dtypes]
    dtype, grads, params = dtypes
    return StateBucket(
        size,
        size // optimizer.distributed_size,
        dtype,
        optimizer.device,
        grads,
        params,
        sum(bucket.bucket_size for bucket in before),
        optimizer.store_params,
        optimizer.store_param_remainders,
    )


@torch.no_grad()
def take_values(optimizer: Any, param: Tensor, flat: Tensor) -> None:
    """Make ``flat``, in the parameter's order of memory, this rank's values of the parameter."""
    from . import scaling

    for fragment in optimizer.state[param]["fragments"]:
        if not fragment.in_local_shard:
            continue
        bucket = optimizer.state["buckets"][fragment.bucket_id]
        values = flat[slice(*fragment.shard_param_range)]
        if optimizer.with_scaled_states:
            scaling.store(bucket, fragment, 0, values)
        elif bucket.params_shard is not None:
            bucket.params_shard[slice(*fragment.shard_range)].copy_(values)


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
