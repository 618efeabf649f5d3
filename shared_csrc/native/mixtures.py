"""Refuses calls with tensors of which some are on the meta device and others are not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor


def refusing_mixtures(overload: Any, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a fake kernel, which torch takes if a single argument is on the meta device.

    Otherwise results would be uninitialized memory, and nothing would be written. As in torch's
    functions, 0-dimensional tensors that are only read may be on the CPU among meta tensors.
    """
    arguments = overload._schema.arguments

    @functools.wraps(fake)
    def checked(*args: Any, **kwargs: Any) -> Any:
        meta = other = None
        for argument, value in _given(arguments, args, kwargs):
            is_list = isinstance(value, (list, tuple))
            is_number = not is_list and argument.alias_info is None
            for tensor in value if is_list else (value,):
                if not isinstance(tensor, Tensor):
                    break
                if tensor.device.type == "meta":
                    meta = argument.name, tensor
                elif not (is_number and tensor.dim() == 0 and tensor.device.type == "cpu"):
                    other = argument.name, tensor
        if meta is not None and other is not None:
            raise RuntimeError(
                f"{overload.name()}: {other[0]} is on {other[1].device}, but {meta[0]} is on meta; "
                "tensors of one call must be on one device. Move all of them there."
            )
        return fake(*args, **kwargs)

    return checked


def _given(
    arguments: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Arguments of the schema with what they were given."""
    yield from zip(arguments, args, strict=False)
    yield from (
        (argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs
    )
