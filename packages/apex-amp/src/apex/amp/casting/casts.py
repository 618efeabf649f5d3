"""Casts of tensors, alone and inside of nested arguments and outputs."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

HALVES = (torch.float16, torch.bfloat16)
_SEQUENCES = (list, set, frozenset, collections.deque)


def to_float32(value: Any) -> Any:
    """Cast a 16-bit tensor to float32; anything else is left as it is."""
    is_half = isinstance(value, torch.Tensor) and value.dtype in HALVES
    return value.float() if is_half else value


def to_type(dtype: torch.dtype, t: Any) -> Any:
    """Cast ``t`` to ``dtype``: a tensor if it is floating point, anything else by its ``.to``."""
    if isinstance(t, torch.Tensor):
        return t.to(dtype) if t.is_floating_point() else t
    return t.to(dtype)


def applier(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Apply ``fn`` to the tensors in ``value``, and to objects with a method ``to``.

    Lists, tuples (named ones, too), sets, deques and dicts are rebuilt with their own type, other
    mappings become dicts, iterators become iterators. Modules, arrays and everything else are left
    as they are.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (str, bytes, type, torch.nn.Module)):
        return value
    if hasattr(value, "to"):
        return fn(value)
    if isinstance(value, Mapping):
        return _apply_to_mapping(value, fn)
    if isinstance(value, tuple):
        items = [applier(item, fn) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, _SEQUENCES):
        return type(value)(applier(item, fn) for item in value)
    if isinstance(value, Iterator):
        return (applier(item, fn) for item in value)
    return value


def _apply_to_mapping(value: Mapping, fn: Callable[[Any], Any]) -> Mapping:
    items = {key: applier(item, fn) for key, item in value.items()}
    # The copy of any other mapping may share its items with the caller's.
    if type(value) is dict or not isinstance(value, (dict, collections.UserDict)):
        return items
    # Keeps what a subclass has besides its items, such as the attributes of a model's output.
    result = copy.copy(value)
    for key, item in items.items():
        result[key] = item
    return result
