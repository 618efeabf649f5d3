"""Finds what a script has changed in :mod:`apex.amp.lists`; amp takes it as registrations."""

from __future__ import annotations

from typing import Any

import torch

from ..lists import functional_overrides, tensor_overrides, torch_overrides

WIDEST = "widest"  # among the dtypes of the arguments
# (id of module, name) -> (module, target): a dtype, WIDEST, or None for no cast at all.
Registry = dict[tuple[int, str], tuple[Any, Any]]

_MODULES = (functional_overrides, torch_overrides, tensor_overrides)
_LOWER_LISTS = {torch.float16: "FP16_FUNCS", torch.bfloat16: "BFLOAT16_FUNCS"}


def _targets(patch_type: torch.dtype) -> Registry:
    kinds = {
        _LOWER_LISTS[patch_type]: patch_type,
        "FP32_FUNCS": torch.float32,
        "CASTS": WIDEST,
        "SEQUENCE_CASTS": WIDEST,
    }
    return {
        (id(lists.MODULE), name): (lists.MODULE, target)
        for lists in _MODULES
        for list_name, target in kinds.items()
        for name in getattr(lists, list_name, ())
    }


_SHIPPED = {patch_type: _targets(patch_type) for patch_type in _LOWER_LISTS}


def list_changes(patch_type: torch.dtype) -> Registry:
    """The functions that a script has put into another list, or has added or removed.

    Raises:
        ValueError: a list names a function that its module does not have.
    """
    shipped, present = _SHIPPED[patch_type], _targets(patch_type)
    changes = {key: entry for key, entry in present.items() if shipped.get(key) != entry}
    for key, (module, _) in shipped.items():
        if key not in present:
            changes[key] = module, None
    for (_, name), (module, _) in changes.items():
        if not hasattr(module, name):
            raise ValueError(
                f"amp: apex.amp.lists names {name!r}, which {module.__name__} does not have."
            )
    return changes
