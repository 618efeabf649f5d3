"""Finding the tensors in whatever a module's forward returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_of(output: Any, _within: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """Tensors in nested lists, tuples, mappings and dataclasses; other objects are passed over."""
    if isinstance(output, Tensor):
        yield output
        return
    if isinstance(output, Mapping):
        items = list(output.values())
    elif isinstance(output, list | tuple):
        items = output
    elif is_dataclass(output) and not isinstance(output, type):
        items = [getattr(output, entry.name, None) for entry in fields(output)]
    else:
        return
    if id(output) in _within:
        return  # an object that holds its holder, such as a node that knows its parent
    for item in items:
        yield from tensors_of(item, (*_within, id(output)))
