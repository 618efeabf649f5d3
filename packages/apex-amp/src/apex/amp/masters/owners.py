"""Refuses a parameter in two optimizers of which one has masters: they undo each other's steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .._amp_state import _amp_state

_LIVE: weakref.WeakSet[Any] = weakref.WeakSet()  # every optimizer that amp has initialized


def note_owner(optimizer: Any) -> None:
    """Remember an optimizer for as long as it lives."""
    with _amp_state.changing:  # for those who list them
        _LIVE.add(optimizer)


def check_masters_are_apart(optimizers: Sequence[Any], has_masters: bool) -> None:
    """Raise ``RuntimeError`` if optimizers share a parameter, or an earlier one has it.

    Args:
        optimizers: about to be initialized.
        has_masters: whether they are to have master weights.
    """
    owners: dict[int, int] = {}
    for i, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for k, param in enumerate(group["params"]):
                owner = owners.setdefault(id(param), i)
                if owner != i and has_masters:
                    raise RuntimeError(
                        f"amp.initialize: optimizers[{i}].param_groups[{g}]['params'][{k}] is also "
                        f"in optimizers[{owner}]. Each would step on a master weight of its own, "
                        "and undo the other's steps. Give it to one of them, or use a level "
                        "without master weights, such as O1 or O4."
                    )
            where = f"amp.initialize: optimizers[{i}].param_groups[{g}]['params']"
            check_has_no_owner(where, group["params"], has_masters, besides=optimizer)


def check_has_no_owner(
    where: str, params: Iterable[torch.Tensor], has_masters: bool, besides: Any
) -> None:
    """Raise ``RuntimeError`` if another living optimizer has one of ``params``, with masters.

    Args:
        where: names ``params`` for the message.
        params: of a group that ``besides`` is to have.
        has_masters: whether it steps on masters; else only owners that do are refused.
        besides: the optimizer that is to have them.
    """
    params = list(params)
    if _owner(params, has_masters, besides) is None:
        return
    gc.collect()  # optimizers under amp hold themselves: one that was dropped may still be there
    found = _owner(params, has_masters, besides)
    if found is not None:
        index, owner = found
        raise RuntimeError(
            f"{where}[{index}] belongs to another {type(owner).__name__} that amp initialized "
            "before and that is still in use. One of the two steps on master weights, which "
            "overwrite what the other did. Drop the other one first, with all that refers to it, "
            "such as its learning-rate scheduler; or give the parameter to one of them."
        )


def _owner(params: list[torch.Tensor], has_masters: bool, besides: Any) -> tuple[int, Any] | None:
    """The index of a parameter, and the optimizer that has it."""
    with _amp_state.changing:
        live = list(_LIVE)
    for owner in live:
        stash = owner._amp_stash
        if owner is besides or not (has_masters or stash.has_masters):
            continue
        own = [p for group in owner.param_groups for p in group["params"]]
        ids = set(map(id, (*own, *stash.all_fp16_params)))
        for index, param in enumerate(params):
            if id(param) in ids:
                return index, owner
    return None
