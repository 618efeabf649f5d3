"""State dicts that hold whole parameters (format 2), for any number of ranks and any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import local_states
from .arguments import NAME, check_state, count_of
from .collectives import all_gather, load_together
from .held_values import KEYS, read, send_parameters, value_dtype, write_all
from .layout import flat_like, shaped_view
from .ownership import check_complete, check_owner
from .plans import agree

_MASTERS = ("param", "master_param")  # ours, and FusedAdam's
_WHERE = f"{NAME}.load_state_dict"
_GIVEN_UP = ("amsgrad", "maximize")  # of torch's Adam, which this optimizer has not


def state_dict(
    optimizer: Any, *, state_dict_format: int | None = None, gather_on_root: bool | None = None
) -> dict[str, Any] | None:
    """The state; a collective call.

    Args:
        state_dict_format: 2, the default: whole parameters and moments as CPU tensors, the same
            on all ranks, which load with any number of ranks and any options; for
            ``torch.optim.AdamW`` see :func:`for_torch`. 1, deprecated: each rank's shares.
        gather_on_root: with format 1: all shares on the first rank, and None on the others.

    Raises:
        ValueError: another format, or ``gather_on_root`` with format 2.
        NotImplementedError: format 1 with scaled states.
        RuntimeError: with ``store_param_remainders``, if another optimizer has the parameters.
    """
    form = 2 if state_dict_format is None else state_dict_format
    if form not in (1, 2):
        raise ValueError(f"{NAME}.state_dict: state_dict_format must be 1 or 2, got {form}.")
    check_complete(optimizer, "state_dict")
    optimizer.param_sync()
    agree(optimizer)  # parameters that no backward has seen have a state, too
    if form == 1:
        return local_states.save(optimizer, True if gather_on_root is None else gather_on_root)
    if gather_on_root is not None:
        raise ValueError(f"{NAME}.state_dict: gather_on_root is only for state_dict_format=1.")
    step = int(optimizer.state["step"])
    state: dict[Any, Any] = {"step": step}
    params = list(optimizer.parameters())
    flats = {
        index: {key: torch.empty(p.numel(), dtype=value_dtype(optimizer)) for key in KEYS}
        for index, p in enumerate(params)
        if "fragments" in optimizer.state[p]
    }
    for key in KEYS:
        for bucket_id in range(len(optimizer.state["buckets"])):
            _collect(optimizer, bucket_id, key, flats)
    for index, entry in flats.items():
        state[index] = {k: shaped_view(params[index], v).contiguous() for k, v in entry.items()}
    order = bucket_order(optimizer)
    # FusedAdam counts the steps of groups.
    groups = [{**group, "step": step} for group in local_states.pack_groups(optimizer)]
    return {"state": state, "param_groups": groups, "format": 2, "bucket_order": order}


def for_torch(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state of format 2 as ``torch.optim.AdamW`` has it: each parameter with its ``step``.

    Args:
        state_dict: what ``DistributedFusedAdam.state_dict`` returned. It is not changed.

    Example:
        >>> plain = torch.optim.AdamW(model.parameters())
        >>> plain.load_state_dict(for_torch(optimizer.state_dict()))

    Raises:
        ValueError: it is of another format.
    """
    check_state(state_dict, "for_torch")
    if state_dict.get("format", 2) != 2 or "step" not in state_dict["state"]:
        raise ValueError(
            f"for_torch: the state must be of format 2, as {NAME}.state_dict() returns, got "
            f"format {state_dict.get('format')}."
        )
    step = torch.tensor(float(state_dict["state"]["step"]))
    state = {
        index: {**entry, "step": step.clone()}
        for index, entry in state_dict["state"].items()
        if index != "step"
    }
    return {"state": state, "param_groups": state_dict["param_groups"]}


def bucket_order(optimizer: Any) -> list[int]:
    """Indices of the parameters in buckets, in their order there."""
    starts, buckets = group_starts(optimizer), optimizer.state["buckets"]
    fragments = (fragment for bucket in buckets for fragment in bucket.fragments)
    return list(dict.fromkeys(starts[f.param_group_id] + f.param_id for f in fragments))


@torch.no_grad()
def _collect(optimizer: Any, bucket_id: int, key: str, flats: dict[int, dict[str, Tensor]]) -> None:
    """Gather one state of a bucket, and cut it into whole parameters on the host."""
    bucket = optimizer.state["buckets"][bucket_id]
    dtype = value_dtype(optimizer)
    shard = torch.zeros(bucket.shard_size, dtype=dtype, device=bucket.device)
    for fragment in bucket.local_fragments():
        shard[slice(*fragment.shard_range)] = read(optimizer, bucket, fragment, key)
    whole = torch.empty(bucket.bucket_size, dtype=dtype, device=bucket.device)
    all_gather(whole, shard, optimizer.groups).wait()
    whole = whole.cpu()
    starts = group_starts(optimizer)
    for fragment in bucket.fragments:
        flat = flats[starts[fragment.param_group_id] + fragment.param_id][key]
        flat[slice(*fragment.param_range)] = whole[slice(*fragment.bucket_range)]


def group_starts(optimizer: Any) -> list[int]:
    """The index of each group's first parameter, as torch numbers them."""
    starts, count = [], 0
    for group in optimizer.param_groups:
        starts.append(count)
        count += len(group["params"])
    return starts


def load_state_dict(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Take a state, and the parameters if it has them; a collective call.

    Args:
        state_dict: of either format, of ``torch.optim.AdamW`` or FusedAdam; it is not changed.

    Raises:
        ValueError: it does not fit the parameters, is damaged, or its format is unknown.
        RuntimeError: another rank refuses its state or has that of another step, or another
            optimizer has the parameters. Nothing has changed then, on any rank.
    """
    check_owner(optimizer, "load_state_dict")
    optimizer.param_sync()

    def check() -> tuple[Any, Callable[[], None]]:
        if form_of(state_dict) == 1:
            local = local_states.own_part_of(optimizer, state_dict)
            return (1, local["state"]["step"]), lambda: local_states.load(optimizer, local)
        entries = _checked_entries(optimizer, state_dict)
        step = _count_of(state_dict, [entry for _, entry in entries])
        return (2, step), lambda: _take(optimizer, state_dict, entries, step)

    load_together(check, optimizer.process_group, optimizer.device, _WHERE)


def form_of(state_dict: Any) -> int:
    """The format of a state, by what it says or holds.

    Raises:
        ValueError: it is no state.
    """
    if not isinstance(state_dict, Mapping) or "gathered_states" not in state_dict:
        check_state(state_dict, _WHERE)
    form = state_dict.get("format")
    if form is None:
        is_local = "gathered_states" in state_dict or "buckets" in state_dict.get("state", {})
        form = 1 if is_local else 2
    if form not in (1, 2):
        raise ValueError(f"{_WHERE}: format must be 1 or 2, got {form!r}.")
    return form


def _checked_entries(
    optimizer: Any, state_dict: dict[str, Any]
) -> list[tuple[Tensor, dict[str, Any]]]:
    """Parameters with their saved values, of those that the state has values of."""
    groups, state = state_dict["param_groups"], state_dict["state"]
    check_state(state_dict, _WHERE)
    local_states.check_groups(optimizer, groups)
    _check_options(optimizer, groups)
    indices = [i for group in groups for i in group["params"]]
    order = state_dict.get("bucket_order", ())
    strange = sorted(map(repr, {*state, *order} - {*indices, "step"}))
    if strange or len({*indices}) < len(indices) or len({*order}) < len(order):
        raise ValueError(
            f"{_WHERE}: the state holds {strange or 'parameters twice'}, but its groups name the "
            f"parameters {indices}, each once."
        )
    pairs = zip(optimizer.parameters(), indices, strict=True)
    is_ours = "bucket_order" in state_dict
    return [(param, _checked(param, state[i], i, is_ours)) for param, i in pairs if i in state]


def _take(
    optimizer: Any, state_dict: dict[str, Any], entries: list[tuple[Tensor, Any]], step: int
) -> None:
    local_states.take_groups(optimizer, state_dict["param_groups"])
    # The same buckets, where there are none yet: sums are then rounded as they would have been.
    indices = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = dict(zip(indices, optimizer.parameters(), strict=True))
    optimizer.init_params([params[i] for i in state_dict.get("bucket_order", ())])
    _fill(optimizer, entries)
    local_states.set_step(optimizer, step)


def _checked(param: Tensor, entry: Any, index: Any, is_ours: bool) -> dict[str, Any]:
    """A parameter's saved values by our keys."""
    needed = KEYS if is_ours else ("exp_avg", "exp_avg_sq")
    if not isinstance(entry, Mapping) or not set(needed) <= entry.keys():
        got = sorted(map(str, entry)) if isinstance(entry, Mapping) else type(entry).__name__
        raise ValueError(
            f"{_WHERE}: state {index!r} must be a dict with {', '.join(needed)}, got {got}. It is "
            "damaged, or comes from another kind of optimizer."
        )
    found = {key: entry[key] for key in ("exp_avg", "exp_avg_sq")}
    for key in _MASTERS:
        if entry.get(key) is not None:
            found["param"] = entry[key]
    for key, value in found.items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
            raise ValueError(
                f"{_WHERE}: state {index}[{key!r}] must be a floating-point tensor, got "
                f"{type(value).__name__ if not isinstance(value, Tensor) else value.dtype}."
            )
        if value.shape != param.shape or value.layout != torch.strided:
            raise ValueError(
                f"{_WHERE}: state {index}[{key!r}] has shape {list(value.shape)}, "
                f"but the parameter has {list(param.shape)}. The checkpoint is of another model."
            )
    if bool((found["exp_avg_sq"] < 0).any()):
        raise ValueError(
            f"{_WHERE}: state {index}['exp_avg_sq'] has negative numbers, which squares' averages "
            "cannot be. The checkpoint is damaged; load an older one."
        )
    return {**found, "step": entry.get("step")}


def _check_options(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    for group in groups:
        given_up = [name for name in _GIVEN_UP if group.get(name)]
        if given_up:
            raise ValueError(
                f"{_WHERE}: the state comes from an optimizer with {given_up[0]}="
                "True, which this one does not support."
            )
        decoupled = group.get("decoupled_weight_decay", bool(optimizer.adam_w_mode))
        if decoupled != bool(optimizer.adam_w_mode) and group.get("weight_decay"):
            raise ValueError(
                f"{_WHERE}: the state comes from an optimizer with decoupled weight "
                f"decay {decoupled}: give {NAME} adam_w_mode={decoupled}."
            )


def _count_of(state_dict: dict[str, Any], entries: list[dict[str, Any]]) -> int:
    """The one count of steps, wherever the state has it."""
    count = state_dict["state"].get("step")
    if count is not None:
        return count_of(count, _WHERE)
    counts = {count_of(e["step"], _WHERE) for e in entries if e["step"] is not None}
    groups = state_dict["param_groups"]
    counts |= {count_of(g["step"], _WHERE) for g in groups if g.get("step") is not None}
    if len(counts) > 1:
        raise ValueError(
            f"{_WHERE}: parameters have taken different numbers of steps, "
            f"{sorted(counts)}; this optimizer counts them for all at once."
        )
    return counts.pop() if counts else 0


@torch.no_grad()
def _fill(optimizer: Any, entries: list[tuple[Tensor, dict[str, Any]]]) -> None:
    optimizer.init_params()
    optimizer.init_params([param for param, _ in entries])
    agree(optimizer)
    known = {id(param): entry for param, entry in entries}
    has_masters = False
    for param in optimizer.parameters():
        entry = known.get(id(param), {})  # without one it begins anew, with the value it has
        for key in KEYS:
            values = entry.get(key)
            has_masters |= key == "param" and values is not None
            if values is None and key == "param":
                values = param
            zeros = torch.zeros((), device=param.device).expand(param.numel())
            flat = zeros if values is None else flat_like(param, values)
            write_all(optimizer, param, key, flat)
    if has_masters:
        send_parameters(optimizer)
