"""State dicts: exchange with torch.optim and with Apex's own layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._buckets import MASTER
from ._gradients import describe


def complete_groups(groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
    """Add the keys that a loaded state does not know, such as one of torch.optim.AdamW."""
    for group in groups:
        for key, value in defaults.items():
            group.setdefault(key, value)


def separate_steps(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Give every parameter a ``step`` of its own, which torch.optim counts in place."""
    state = {
        index: {
            key: value.clone() if key == "step" and isinstance(value, Tensor) else value
            for key, value in entry.items()
        }
        for index, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def load_state(
    optimizer: Any, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """Check the whole state, load it, and put the moments back in the precision they came in.

    Raises:
        ValueError: groups, or shapes of the state, do not fit. Nothing is changed then.
    """
    pairs = matching_params(optimizer, state_dict)
    layout = optimizer.layout
    for param, saved in pairs:
        for key in (*layout.moments, MASTER):
            if key in saved and saved[key].shape != param.shape:
                raise ValueError(
                    f"{layout.optimizer}.load_state_dict: state {key!r} has shape "
                    f"{list(saved[key].shape)}, but its parameter is {describe(param)}. The "
                    "checkpoint is of another model."
                )
        optimizer.check_saved(saved)
    for group in state_dict["param_groups"]:
        optimizer.check_saved_group(group)
    load(state_dict)
    complete_groups(optimizer.param_groups, optimizer.defaults)
    for param, saved in pairs:
        _restore(optimizer, param, saved)
    for group in optimizer.param_groups:
        _restore_group(optimizer, group)


def matching_params(
    optimizer: Any, state_dict: dict[str, Any]
) -> list[tuple[Tensor, dict[str, Any]]]:
    """The optimizer's parameters with the saved state of each that has one.

    Raises:
        ValueError: the saved groups have other numbers of parameters.
    """
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        raise ValueError(
            f"{optimizer.layout.optimizer}.load_state_dict: the optimizer has groups of {sizes} "
            f"parameters, but the state has groups of {saved_sizes}."
        )
    params = [param for group in groups for param in group["params"]]
    indices = [index for group in saved_groups for index in group["params"]]
    state = state_dict["state"]
    return [(p, state[i]) for p, i in zip(params, indices, strict=True) if i in state]


def _restore(optimizer: Any, param: Tensor, saved: dict[str, Any]) -> None:
    """torch casts state to the parameter's dtype when it loads; the kernels need it wide."""
    for key in (*optimizer.layout.moments, MASTER):
        if key in saved:
            optimizer.restore_moment(param, key, saved[key])


def _restore_group(optimizer: Any, group: dict[str, Any]) -> None:
    """``group["step"]`` of the kind this optimizer keeps, also from torch's per-parameter steps."""
    if optimizer.layout.counts_group_steps:
        _restore_count(optimizer, group)
    if optimizer.capturable:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).clone()
    elif isinstance(group["lr"], Tensor) and not isinstance(optimizer.defaults["lr"], Tensor):
        group["lr"] = float(group["lr"])


def _restore_count(optimizer: Any, group: dict[str, Any]) -> None:
    steps = [optimizer.state[p].get("step") for p in group["params"] if p in optimizer.state]
    known = [int(step) for step in steps if step is not None]
    count = int(group["step"]) if "step" in group else max(known, default=0)
    if count == 0 and not known:
        group.pop("step", None)
    elif optimizer.capturable:
        device = group["params"][0].device if group["params"] else None
        group["step"] = torch.tensor([count], dtype=torch.int32, device=device)
    else:
        group["step"] = count
