"""Finding the tensors in whatever a module's forward returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Tensors in nested lists, tuples and mappings; other objects are passed over."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from tensors_of(item)
    elif isinstance(output, list | tuple):
        for item in output:
            yield from tensors_of(item)
