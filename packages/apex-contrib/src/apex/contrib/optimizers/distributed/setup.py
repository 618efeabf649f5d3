"""What the constructor does beyond its arguments: state, hooks, and rank 0's parameters."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import Any

import torch

from ..._shared.native.writes import keep_from_tracing
from . import layout, ownership
from .arguments import NAME, check_group, device_of
from .collectives import Groups, broadcast, check_alike
from .gradients import Round
from .parameters import watch_module

# Arguments that become attributes of the optimizer.
_KEPT = (
    *("dtype", "adam_w_mode", "average_grad_sync", "overlap_grad_sync", "bucket_cap_mb"),
    *("pipeline_size", "contiguous_param_buffer", "contiguous_grad_buffer", "store_params"),
    *("store_param_remainders", "with_scaled_states", "nccl_ub", "capturable"),
)


def prepare(optimizer: Any, given: dict[str, Any]) -> None:
    """Make the optimizer's attributes and state, hook its parameters, and broadcast them.

    Args:
        given: the constructor's arguments.
    """
    keep_from_tracing(type(optimizer))
    for name in _KEPT:
        setattr(optimizer, name, given[name])
    optimizer.grad_sync_dtype = given["grad_sync_dtype"] or given["dtype"]
    optimizer.param_sync_dtype = given["param_sync_dtype"] or given["dtype"]
    optimizer.greedy_grad_copy = given["overlap_grad_sync"]
    module = given["module"]
    optimizer.overlap_param_sync = given["overlap_param_sync"] and module is not None
    _take_groups(optimizer, given)
    _make_state(optimizer)
    take_in(optimizer, optimizer.param_groups)
    check_free(optimizer)
    optimizer._broadcast_params()
    if optimizer.overlap_param_sync:
        watch_module(optimizer, module)
    if optimizer.contiguous_param_buffer or optimizer.contiguous_grad_buffer:
        optimizer.init_params()
    if optimizer.contiguous_param_buffer:
        optimizer.init_param_buffer()
    listen(optimizer, optimizer.param_groups)  # nothing can fail any more


def _take_groups(optimizer: Any, given: dict[str, Any]) -> None:
    """The process groups, and what Apex calls their parts."""
    names = ("process_group", "distributed_process_group", "redundant_process_group")
    groups = optimizer.groups = Groups(*(given[name] for name in names), NAME)
    for name, group in zip(names, (groups.all, groups.distributed, groups.redundant), strict=True):
        setattr(optimizer, name, group)
    optimizer.process_group_size, optimizer.process_group_root = groups.size, groups.root
    optimizer.distributed_size, optimizer.distributed_rank = groups.shards, groups.shard
    optimizer.redundant_size = groups.copies


def _make_state(optimizer: Any) -> None:
    device = optimizer.device
    optimizer._lock = threading.Lock()  # hooks may run in autograd's threads
    optimizer.streams = []
    if device.type == "cuda":
        optimizer.streams = [torch.cuda.Stream(device) for _ in range(optimizer.pipeline_size)]
    optimizer.state["buckets"], optimizer.state["step"] = [], 0
    if optimizer.capturable:
        optimizer.state["step"] = torch.zeros(1, dtype=torch.int32, device=device)
    optimizer.grads_buckets = defaultdict(layout.GradientBucket)
    optimizer._params_buckets = {}
    optimizer._param_buffers = {}  # by dtypes
    optimizer._grad_buffers, optimizer.nccl_pool = {}, None  # by bucket
    optimizer._grad_scale = torch.ones((), dtype=torch.float32, device=device)
    optimizer._grad_norm = None
    optimizer.found_inf = torch.zeros(1, dtype=torch.float32, device=device)
    optimizer._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32, device=device)
    optimizer.round, optimizer.reducing, optimizer.is_reduced = Round(), [], False
    optimizer.taken = set()  # id(param): its gradient is in buckets since its hook ran
    optimizer.is_sole_reducer = None  # whether nothing else is known to reduce; None: not asked
    optimizer.arrivals = {}  # parameters without buckets, in the order of their gradients
    optimizer.plan_is_agreed = False
    optimizer.planned = deque()  # of parameters that are about to get buckets
    optimizer.late = set()  # parameters that arrived after their forward
    optimizer._hook_handles = []
    optimizer._successor = None  # the name of an optimizer that took over its parameters
    optimizer.is_stepped = False  # whether a step has used the gradients
    optimizer.fragments = {}  # by id of parameter: quicker than state, which hashes tensors


def take_in(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    """Check groups, and note where their parameters stand."""
    for group in groups:
        check_group(group)
        for param in group["params"]:
            layout.memory_order(param)  # raises if it has gaps
    optimizer._positions = layout.positions(optimizer.param_groups)
    if optimizer.capturable:
        for group in groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=optimizer.device)


def check_free(optimizer: Any) -> None:
    """Raise RuntimeError on all ranks where parameters cannot be taken from their owners."""
    params, group = list(optimizer.parameters()), optimizer.process_group
    ownership.check_free(optimizer, params, group, optimizer.device)


def listen(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    """Own the parameters of groups, and hook them; also those that are frozen, for later."""
    params, handles = [param for group in groups for param in group["params"]], []
    for param in params:
        hook = optimizer._make_post_backward_hook(param, *optimizer.position_of(param))
        was_trained = param.requires_grad
        param.requires_grad_(True)  # which hooks need
        handles.append(param.register_post_accumulate_grad_hook(hook))
        param.requires_grad_(was_trained)
    ownership.claim(optimizer, params, handles)


def add_group(optimizer: Any) -> None:
    """Take in the group that was added last; it is gone again if that fails."""
    group = optimizer.param_groups[-1:]
    try:
        ownership.check_owner(optimizer, "add_param_group")
        device_of(optimizer.parameters(), optimizer.device)
        take_in(optimizer, group)
        check_free(optimizer)
        optimizer.param_sync()
        optimizer._broadcast_params()
    except BaseException:
        optimizer.param_groups.pop()
        optimizer._positions = layout.positions(optimizer.param_groups)
        raise
    listen(optimizer, group)


@torch.no_grad()
def broadcast_parameters(optimizer: Any) -> None:
    """Give all ranks the parameters of the first one.

    Raises:
        RuntimeError: the ranks' parameters differ in shape, dtype or format.
    """
    params = list(optimizer.parameters())
    facts = [(tuple(p.shape), p.dtype, layout.memory_order(p)) for p in params]
    check_alike(facts, "the parameters", optimizer.groups, optimizer.device, NAME)
    broadcast([layout.flat_view(param) for param in params], optimizer.groups)
