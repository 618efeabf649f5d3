"""Casts of functions that torch's dispatcher never sees whole: written in Python, or operators."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from ._nested import applier, to_type

# Functions of several ops, some of which would run in 16 bits.
_FLOAT32_FUNCTIONS = ((F, "interpolate"), (F, "multilabel_soft_margin_loss"))
# `half += float32` makes a float32 tensor of the left side, as `half + float32` does.
_IN_PLACE_OPERATORS = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__")
_HALVES = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def cast_functions(except_for: Collection[tuple[int, str]] = ()) -> Iterator[None]:
    """Have these functions cast, where autocast is on, within the context.

    Args:
        except_for: functions to leave alone, as ``(id(module), name)``.
    """
    makers = {
        _in_float32: _FLOAT32_FUNCTIONS,
        _method_in_float32: [(torch.Tensor, name) for name in ("cpu", "__ipow__")],
        _operator_in_widest: [(torch.Tensor, name) for name in _IN_PLACE_OPERATORS],
    }
    with contextlib.ExitStack() as undo:
        for make, functions in makers.items():
            for module, name in functions:
                if (id(module), name) not in except_for:
                    undo.enter_context(replaced(module, name, make))
        yield


@contextlib.contextmanager
def replaced(module: Any, name: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    """``module.name`` is ``make(module.name)`` within the context."""
    is_own = name in vars(module)  # not inherited from a base class
    own = vars(module).get(name)
    found = static_or_class_method(module, name)
    made = make(getattr(module, name)) if found is None else type(found)(make(found.__func__))
    setattr(module, name, made)
    try:
        yield
    finally:
        if is_own:
            setattr(module, name, own)
        else:
            delattr(module, name)


def static_or_class_method(module: Any, name: str) -> staticmethod | classmethod | None:
    """What a class has by the name, if that is one of the two: getattr gives the function in it."""
    found = inspect.getattr_static(module, name, None) if isinstance(module, type) else None
    return found if isinstance(found, (staticmethod, classmethod)) else None


def _casts(tensor: Any) -> bool:
    """Whether casts are on here and now for this tensor, and it is in 16 bits."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype in _HALVES
        and tensor.device.type != "meta"  # which has no autocast
        and torch.is_autocast_enabled(tensor.device.type)
    )


def _in_float32(function: Callable) -> Callable:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if any(map(_casts, (*args, *kwargs.values()))):
            cast = functools.partial(to_type, torch.float32)
            args, kwargs = applier(args, cast), applier(kwargs, cast)
        return function(*args, **kwargs)

    return wrapper


def _method_in_float32(method: Callable) -> Callable:
    @functools.wraps(method)
    def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return method(self.float() if _casts(self) else self, *args, **kwargs)

    return wrapper


def _operator_in_widest(operator: Callable) -> Callable:
    @functools.wraps(operator)
    def wrapper(self: torch.Tensor, other: Any) -> Any:
        is_mixed = isinstance(other, torch.Tensor) and other.dtype is not self.dtype
        # A tensor without dimensions counts as a number, in torch's own rules, too.
        if is_mixed and other.is_floating_point() and other.dim() and _casts(self):
            self = self.to(torch.promote_types(self.dtype, other.dtype))
        return operator(self, other)

    return wrapper
