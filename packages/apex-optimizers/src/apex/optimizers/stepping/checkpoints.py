"""State dicts: exchange with torch.optim and with Apex's own layout."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .checks import describe
from .numbers import lr_tensor, numbers_device
from .sharding import is_sharded

_OPTIONS = ("lr", "betas", "eps", "weight_decay", "momentum")


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Make tensors that later steps can write to, where a user calls under inference_mode."""
    is_grad_enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_grad_enabled):
        yield


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
        if isinstance(entry, dict)
        else entry
        for index, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def load_between_hooks(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    load: Callable[[dict[str, Any]], None],
    check: Callable[[dict[str, Any]], Callable[[], None]],
) -> None:
    """Load a state with checks after the last pre hook, and repairs before the first post hook.

    Pre hooks may return another state, and post hooks may replace what was loaded; torch runs both
    inside of its own loading, so that only hooks can come between. These calls can be nested.

    Args:
        optimizer: whose hooks these are.
        state_dict: as it was given to ``load_state_dict``.
        load: that of :class:`torch.optim.Optimizer`, or one that calls it.
        check: called with what the pre hooks made of the state; may raise, and returns what is to
            be done when torch has loaded it.
    """
    repairs: list[Callable[[], None]] = []
    handles = [
        optimizer.register_load_state_dict_pre_hook(
            lambda _, hooked: repairs.append(check(hooked))
        ),
        optimizer.register_load_state_dict_post_hook(lambda _: repairs.pop()(), prepend=True),
    ]
    try:
        with outside_inference_mode():
            load(state_dict)
    finally:
        for handle in handles:
            handle.remove()


def load_state(
    optimizer: Any, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """Check the whole state, load it, and put the moments back in the precision they came in.

    Raises:
        ValueError: groups, or shapes of the state, do not fit. Nothing is changed then.
    """

    def check(hooked: dict[str, Any]) -> Callable[[], None]:
        pairs = _checked_pairs(optimizer, hooked)
        return lambda: _restore_all(optimizer, pairs)

    load_between_hooks(optimizer, state_dict, load, check)


def _checked_pairs(
    optimizer: Any, state_dict: dict[str, Any]
) -> list[tuple[Tensor, dict[str, Any]]]:
    """The parameters with their saved states, none of which will fail to be restored."""
    pairs = matching_params(optimizer, state_dict)
    layout = optimizer.layout
    for param, saved in pairs:
        for key in optimizer.keys_in(saved):
            _check_saved_tensor(layout.optimizer, param, key, saved[key])
        if "step" in saved:
            _check_count(layout.optimizer, saved["step"])
    for index, group in enumerate(state_dict["param_groups"]):
        _check_options(optimizer, index, group)
        if "step" in group:
            _check_count(layout.optimizer, group["step"])
        optimizer.check_saved_group(group)
    return pairs


def _check_options(optimizer: Any, index: int, group: dict[str, Any]) -> None:
    """Raise ValueError unless a saved group has what the groups of every such optimizer have.

    Other options are missing in states of ``torch.optim`` and of older versions.
    """
    if lost := [name for name in _OPTIONS if name in optimizer.defaults and name not in group]:
        raise ValueError(
            f"{optimizer.layout.optimizer}.load_state_dict: param_groups[{index}] has no "
            f"{', '.join(lost)}; it has {', '.join(map(str, group))}. The checkpoint is damaged, "
            "or of another kind of optimizer."
        )


def _restore_all(optimizer: Any, pairs: list[tuple[Tensor, dict[str, Any]]]) -> None:
    complete_groups(optimizer.param_groups, optimizer.defaults)
    for param, saved in pairs:
        _restore(optimizer, param, saved)
    for group in optimizer.param_groups:
        _restore_group(optimizer, group)


def _check_saved_tensor(optimizer: str, param: Tensor, key: str, value: Any) -> None:
    """Raise ValueError unless a saved state is floating point, complex if its parameter is, of the
    parameter's shape, and sharded if that is.
    """
    where = f"{optimizer}.load_state_dict: state {key!r}"
    got = describe(value) if isinstance(value, Tensor) else repr(value)
    if not (isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())):
        raise ValueError(
            f"{where} must be a tensor of floating point, got {got}. Save moments and masters in "
            "full, not as remainders or as the bytes of smaller numbers."
        )
    if value.is_complex() != param.is_complex():
        raise ValueError(
            f"{where} is {got}, but its parameter is {describe(param)}: states of complex "
            "parameters are complex, and no others. The checkpoint is of another model."
        )
    if value.shape != param.shape:
        raise ValueError(
            f"{where} has shape {list(value.shape)}, but its parameter is {describe(param)}. The "
            "checkpoint is of another model."
        )
    if is_sharded(value) != is_sharded(param):
        kinds = ("a plain tensor", "a DTensor")
        raise ValueError(
            f"{where} is {kinds[is_sharded(value)]}, but its parameter is "
            f"{kinds[is_sharded(param)]}. Let set_optimizer_state_dict of "
            "torch.distributed.checkpoint.state_dict load it."
        )


def _check_count(optimizer: str, step: Any) -> None:
    """Raise ValueError unless ``step`` is one number; it is not read, that is, not waited for."""
    is_one = step.numel() == 1 if isinstance(step, Tensor) else isinstance(step, numbers.Real)
    if not is_one:
        got = describe(step) if isinstance(step, Tensor) else repr(step)
        raise ValueError(
            f"{optimizer}.load_state_dict: step must be a number or one-element tensor, got {got}."
        )


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
    state, keys = optimizer.state[param], optimizer.keys_in(saved)
    for key in {*optimizer.layout.moments} & {*state} - {*keys}:
        del state[key]  # None, as torch saves what a group does not use
    for key in keys:
        optimizer.restore_moment(param, key, saved[key])


def _restore_group(optimizer: Any, group: dict[str, Any]) -> None:
    """``group["step"]`` of the kind this optimizer keeps, also from torch's per-parameter steps."""
    if optimizer.layout.counts_group_steps:
        _restore_count(optimizer, group)
    if optimizer.capturable:
        group["lr"] = lr_tensor(group["lr"]).clone()
    elif optimizer.reads_device_lr or isinstance(optimizer.defaults["lr"], Tensor):
        return
    elif isinstance(group["lr"], Tensor):
        group["lr"] = float(group["lr"])


def _restore_count(optimizer: Any, group: dict[str, Any]) -> None:
    steps = [optimizer.state[p].get("step") for p in group["params"] if p in optimizer.state]
    known = [int(step) for step in steps if step is not None]
    count = int(group["step"]) if "step" in group else max(known, default=0)
    if count == 0 and not known:
        group.pop("step", None)
    elif optimizer.capturable:
        device = numbers_device(group)
        group["step"] = torch.tensor([count], dtype=torch.int32, device=device)
    else:
        group["step"] = count
