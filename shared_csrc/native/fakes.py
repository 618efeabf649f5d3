"""Fake kernels, which torch calls for meta tensors and while it traces, as it may be given them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import SymInt, Tensor

# What Python and torch raise where a fake computes a shape that there is not; torch's own errors of
# tracing are subclasses, and must go on.
_NO_SHAPE = (IndexError, RuntimeError, TypeError, ValueError, ZeroDivisionError)


class Refusal(Exception):
    """What does not fit, in the words of the CPU's kernel."""


def expect(condition: Any, message: str) -> None:
    """Raise in a fake kernel unless ``condition``, which may be symbolic, holds.

    The caller of the operator gets a RuntimeError with the operator's name before the message.
    """
    torch._check_with(Refusal, condition, lambda: message)


def checked_fake(overload: Any, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a fake kernel: its errors begin with the operator's name, and mixed devices are refused.

    torch takes the fake kernel if a single argument is on the meta device. With others elsewhere
    results would be uninitialized memory, and nothing would be written. As in torch's functions,
    0-dimensional tensors that are only read may be on the CPU among meta tensors.
    """
    arguments, name = overload._schema.arguments, overload._schema.name.partition("::")[2]

    @functools.wraps(fake)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = list(_given(arguments, args, kwargs))
        _check_tensors(name, given)
        try:
            return fake(*args, **kwargs)
        except Refusal as error:
            raise RuntimeError(f"{name}: {error}") from None
        except _NO_SHAPE as error:
            if type(error) not in _NO_SHAPE:
                raise
            _raise_shapes(overload, given, error)

    return checked


def _check_tensors(name: str, given: list[tuple[Any, Any]]) -> None:
    meta = other = None
    for argument, value in given:
        is_list = isinstance(value, (list, tuple))
        is_number = not is_list and argument.alias_info is None
        if value is None and str(argument.type) == "Tensor":
            raise RuntimeError(f"{name}: {argument.name} must be a tensor, got None.")
        for tensor in value if is_list else (value,):
            if not isinstance(tensor, Tensor):
                break
            if tensor.device.type == "meta":
                meta = argument.name, tensor
            elif not (is_number and tensor.dim() == 0 and tensor.device.type == "cpu"):
                other = argument.name, tensor
    if meta is not None and other is not None:
        raise RuntimeError(
            f"{name}: {other[0]} is on {other[1].device}, but {meta[0]} is on meta; tensors of one "
            "call must be on one device. Move all of them there."
        )


def _raise_shapes(overload: Any, given: list[tuple[Any, Any]], error: Exception) -> NoReturn:
    """Raise the error of a fake kernel that found no shape for its result."""
    shapes = [f"{a.name} {list(v.shape)}" for a, v in given if isinstance(v, Tensor)]
    numbers = [f"{a.name} {v}" for a, v in given if type(v) is int or isinstance(v, SymInt)]
    namespace, _, name = overload._schema.name.partition("::")
    raise RuntimeError(
        f"{name}: no result has a shape that fits {', '.join(shapes + numbers)} ({error}). "
        f"torch.ops.{namespace}.{name}.default.__doc__ says which shapes fit."
    ) from error


def _given(
    arguments: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Arguments of the schema with what they were given."""
    yield from zip(arguments, args, strict=False)
    yield from (
        (argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs
    )
