"""Casts of functions that torch's dispatcher sees only in parts: Python functions, operators."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from .casts import HALVES, applier, to_float32, to_type

# Functions of several ops, some of which would run in 16 bits.
_FLOAT32_FUNCTIONS = ((F, "interpolate"), (F, "multilabel_soft_margin_loss"))
# `half += float32` makes a float32 tensor of the left side, as `half + float32` does.
_IN_PLACE_OPERATORS = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__")
# With one operand in float32 these run in float32, as amp's lists say. torch itself takes a float32
# tensor without dimensions (a sum, a norm, a learned temperature) for a number.
_ARITHMETIC = ("add", "div", "mul")
_COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")
_OPERATORS = (
    *("__add__", "__sub__", "__mul__", "__truediv__", "__div__"),
    *("__radd__", "__rsub__", "__rmul__", "__rtruediv__", "__rdiv__"),
    *("__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__"),
)


@contextlib.contextmanager
def cast_functions(except_for: Collection[tuple[int, str]] = ()) -> Iterator[None]:
    """Let these functions cast within the context, where autocast is on.

    Args:
        except_for: functions to leave alone, as ``(id(module), name)``.
    """
    makers = {
        _in_float32: _FLOAT32_FUNCTIONS,
        _method_in_float32: [(torch.Tensor, name) for name in ("cpu", "__ipow__")],
        _operator_in_widest: [(torch.Tensor, name) for name in _IN_PLACE_OPERATORS],
        _with_scalars: [
            (module, name)
            for module in (torch, torch.Tensor)
            for name in (*_ARITHMETIC, *_COMPARISONS, *_OPERATORS)
            if hasattr(module, name)
        ],
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
    """The static or class method of that name, which getattr would unpack; None for all else."""
    found = inspect.getattr_static(module, name, None) if isinstance(module, type) else None
    return found if isinstance(found, (staticmethod, classmethod)) else None


def _casts(tensor: Any) -> bool:
    """Whether the tensor is in 16 bits, and casts are on in this thread for its device."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype in HALVES
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
        if is_mixed and (_meets_scalar(self, other) or _is_array(other)) and _casts(self):
            self = self.to(torch.promote_types(self.dtype, other.dtype))
        return operator(self, other)

    return wrapper


def _is_array(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() > 0


@functools.cache  # TorchScript finds the operator of a function by the function's id
def _with_scalars(function: Callable) -> Callable:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        operands = (*args, *kwargs.values()) if kwargs else args
        if (
            len(operands) > 1
            and isinstance(operands[1], torch.Tensor)  # without a frame for numbers
            and _meets_scalar(operands[0], operands[1])
        ):
            args = tuple(map(to_float32, args))
            kwargs = {k: v if k == "out" else to_float32(v) for k, v in kwargs.items()}
        return function(*args, **kwargs)

    name = function.__name__
    if function is getattr(torch._C._VariableFunctions, name, None):
        torch.jit._builtins._register_builtin(wrapper, f"aten::{name}")
    return wrapper


def _meets_scalar(a: Any, b: Any) -> bool:
    """Whether one is a tensor to cast, and the other a float32 tensor without dimensions."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    if a.dtype is b.dtype or (a.dim() == 0) is (b.dim() == 0):
        return False
    scalar, tensor = (b, a) if a.dim() else (a, b)
    return scalar.dtype is torch.float32 and _casts(tensor)
