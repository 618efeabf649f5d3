"""State dicts of each rank's own shares (format 1), and what state dicts say of groups."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .arguments import NAME, check_group, check_state, count_of
from .collectives import load_together
from .plans import agree

_WHERE = f"{NAME}.load_state_dict"
_OPTIONS = ("lr", "betas", "eps", "weight_decay")  # also of torch's Adam and of FusedAdam
_SHARDS = ("params_shard", "param_remainders_shard", "exp_avg_shard", "exp_avg_sq_shard")


def pack_groups(optimizer: Any) -> list[dict[str, Any]]:
    """Parameter groups with indices, as torch numbers them, in place of parameters."""
    packed, count = [], 0
    for group in optimizer.param_groups:
        size = len(group["params"])
        numbers = {k: _plain(v) for k, v in group.items() if k != "params"}
        packed.append({**numbers, "params": list(range(count, count + size))})
        count += size
    return packed


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def check_groups(optimizer: Any, saved: list[dict[str, Any]]) -> None:
    """Raise ValueError unless saved groups fit, and their numbers are in range."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in saved]
    if sizes != saved_sizes:
        raise ValueError(
            f"{_WHERE}: the optimizer has groups of {sizes} parameters, but the "
            f"state has groups of {saved_sizes}."
        )
    for index, (group, loaded) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        if lost := [name for name in _OPTIONS if name not in loaded]:
            raise ValueError(
                f"{_WHERE}: param_groups[{index}] has no {', '.join(lost)}, which the groups of "
                f"every Adam have; it has {', '.join(map(str, loaded))}. The checkpoint is "
                "damaged, or of another kind of optimizer."
            )
        check_group({**group, **loaded})


def take_groups(optimizer: Any, saved: list[dict[str, Any]]) -> None:
    """Take hyper-parameters, and whatever else a saved group holds."""
    for group, loaded in zip(optimizer.param_groups, saved, strict=True):
        for key, value in loaded.items():
            if key in ("params", "step"):
                continue
            if key == "lr" and optimizer.capturable:
                group["lr"].fill_(float(value))
            else:
                group[key] = float(value) if key == "lr" else value


def set_step(optimizer: Any, step: int) -> None:
    """Set the count of steps, where it is kept."""
    if optimizer.capturable:
        optimizer.state["step"].fill_(step)
    else:
        optimizer.state["step"] = step


def save(optimizer: Any, gather_on_root: bool) -> dict[str, Any] | None:
    """This rank's shares; or on the first rank everybody's, as bytes, and None on the others.

    Raises:
        NotImplementedError: states with scales.
    """
    warnings.warn(
        f"{NAME}.state_dict: format 1 loads only with the same ranks and options; use format 2.",
        FutureWarning,
        stacklevel=3,
    )
    if optimizer.with_scaled_states:
        raise NotImplementedError(f"{NAME}.state_dict: format 1 has no scaled states; use 2.")
    buckets = [
        {k: v.cpu() for k in _SHARDS if (v := getattr(bucket, k)) is not None}
        for bucket in optimizer.state["buckets"]
    ]
    state = {
        "buckets": buckets,
        "step": int(optimizer.state["step"]),
        "layout": _layout(optimizer),
    }
    local = {"state": state, "param_groups": pack_groups(optimizer), "format": 1}
    if not gather_on_root:
        return local
    stream = io.BytesIO()
    torch.save(local, stream)
    mine = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
    gathered = _gather(optimizer, mine)
    return None if gathered is None else {"gathered_states": gathered, "format": 1}


def _layout(optimizer: Any) -> list[list[list[int]]]:
    """Where fragments lie, for comparison at loading."""
    return [
        [
            [f.param_group_id, f.param_id, *f.param_range, *f.bucket_range, *(f.shard_range or ())]
            for f in bucket.fragments
        ]
        for bucket in optimizer.state["buckets"]
    ]


def _gather(optimizer: Any, mine: Tensor) -> list[Tensor] | None:
    groups, device = optimizer.groups, optimizer.device
    size = torch.tensor([mine.numel()], device=device)
    sizes = [torch.empty_like(size) for _ in range(groups.size)]
    dist.all_gather(sizes, size, group=groups.all)
    most = max(int(each) for each in sizes)
    padded = torch.zeros(most, dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    is_root = groups.rank == 0
    outs = [torch.empty_like(padded) for _ in range(groups.size)] if is_root else None
    dist.gather(padded, outs, dst=groups.root, group=groups.all)
    if not is_root:
        return None
    return [out[: int(each)].cpu() for out, each in zip(outs, sizes, strict=True)]


def own_part_of(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """This rank's shares, as far as they can be checked without the other ranks.

    Raises:
        ValueError: they are of other ranks, or cannot be read.
    """
    if "gathered_states" in state_dict:
        every = state_dict["gathered_states"]
        if len(every) != optimizer.groups.size:
            raise ValueError(
                f"{_WHERE}: the state is of {len(every)} ranks, these are "
                f"{optimizer.groups.size}. Only format 2 loads with another number of ranks."
            )
        stream = io.BytesIO(every[optimizer.groups.rank].cpu().numpy().tobytes())
        state_dict = torch.load(stream, weights_only=True)
    check_state(state_dict, _WHERE)
    check_groups(optimizer, state_dict["param_groups"])
    state = state_dict["state"]
    if not {"step", "layout", "buckets"} <= state.keys():
        raise ValueError(f"{_WHERE}: 'state' lacks one of step, layout and buckets of format 1.")
    return {**state_dict, "state": {**state, "step": count_of(state["step"], _WHERE)}}


def _check_shares(optimizer: Any, state: dict[str, Any]) -> None:
    """Raise ValueError unless saved shares are those that this rank's buckets have."""
    buckets = optimizer.state["buckets"]
    if state["layout"] != _layout(optimizer) or len(state["buckets"]) != len(buckets):
        raise ValueError(
            f"{_WHERE}: the state's buckets are laid out in another way. Format 1 "
            "loads only with the same ranks, options and order of parameters; call init_params() "
            "before the first step, both when saving and when loading, or use format 2."
        )
    for bucket, saved in zip(buckets, state["buckets"], strict=True):
        kept = {k: v for k in _SHARDS if (v := getattr(bucket, k)) is not None}
        if kept.keys() != set(saved):
            raise ValueError(
                f"{_WHERE}: the state holds {sorted(saved)}, expected "
                f"{sorted(kept)}. Format 1 loads only with the same options."
            )
        for key, own in kept.items():
            value = saved[key]
            if not isinstance(value, Tensor) or (value.shape, value.dtype) != (
                own.shape,
                own.dtype,
            ):
                raise ValueError(
                    f"{_WHERE}: {key} must be {own.dtype} of shape {list(own.shape)}, got "
                    f"{(value.dtype, list(value.shape)) if isinstance(value, Tensor) else value!r}."
                )


@torch.no_grad()
def load(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Take this rank's shares; a collective call.

    Args:
        state_dict: what :func:`own_part_of` returned.

    Raises:
        ValueError: they are of other options. Nothing has changed then, on no rank.
    """
    optimizer.init_params()
    agree(optimizer)
    state = state_dict["state"]

    def take() -> None:
        for bucket, saved in zip(optimizer.state["buckets"], state["buckets"], strict=True):
            for key, value in saved.items():
                getattr(bucket, key).copy_(value)
        take_groups(optimizer, state_dict["param_groups"])
        set_step(optimizer, state["step"])

    def check() -> tuple[Any, Callable[[], None]]:
        _check_shares(optimizer, state)
        return None, take

    load_together(check, optimizer.process_group, optimizer.device, _WHERE)
    if optimizer.store_params:
        from .held_values import send_parameters

        send_parameters(optimizer)
