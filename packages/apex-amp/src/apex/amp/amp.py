"""Switches casts on (``init``), and lets users mark functions whose arguments are to be cast."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._amp_state import _amp_state
from .casting.casts import applier
from .casting.cpu_float16 import float16_through_float32
from .casting.forward import scriptable_forwards
from .casting.functions import cast_functions, replaced
from .casting.list_changes import WIDEST, Registry, list_changes
from .casting.rules import cast_rules
from .handle import AmpHandle, NoOpHandle
from .utils import verbosify

__all__ = [
    "bfloat16_function",
    "float_function",
    "half_function",
    "init",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]

# What the registrars noted for the next `init`.
_USER_CAST_REGISTRY: Registry = {}
_USER_PROMOTE_REGISTRY: Registry = {}
# Asked by decorated functions: the last handle that `init` returned, or that replaced it.
_DECORATOR_HANDLE: AmpHandle | NoOpHandle = NoOpHandle()


def half_function(fn: Callable) -> Callable:
    """Decorator: while casts are on, floating-point arguments of ``fn`` are cast to float16.

    So are those inside of tuples, lists and dicts. What ``fn`` calls is subject to casts as usual.
    """
    return _casting(fn, torch.float16)


def bfloat16_function(fn: Callable) -> Callable:
    """Decorator: as :func:`half_function` with bfloat16."""
    return _casting(fn, torch.bfloat16)


def float_function(fn: Callable) -> Callable:
    """Decorator: as :func:`half_function` with float32."""
    return _casting(fn, torch.float32)


def promote_function(fn: Callable) -> Callable:
    """Decorator: as :func:`half_function` with the widest dtype among the arguments."""
    return _casting(fn, WIDEST)


def register_half_function(module: Any, name: str) -> None:
    """Apply :func:`half_function` to ``module.name`` at the next ``initialize`` or ``init``.

    A function of torch then runs in that dtype, whatever amp's lists say.

    Args:
        module: a module or class, such as ``torch`` or ``torch.nn.functional``.
        name: of the function.

    Raises:
        ValueError: ``module`` has no such attribute.
    """
    _register(_USER_CAST_REGISTRY, module, name, torch.float16)


def register_bfloat16_function(module: Any, name: str) -> None:
    """As :func:`register_half_function` with bfloat16."""
    _register(_USER_CAST_REGISTRY, module, name, torch.bfloat16)


def register_float_function(module: Any, name: str) -> None:
    """As :func:`register_half_function` with float32."""
    _register(_USER_CAST_REGISTRY, module, name, torch.float32)


def register_promote_function(module: Any, name: str) -> None:
    """As :func:`register_half_function` with the widest dtype among the arguments."""
    _register(_USER_PROMOTE_REGISTRY, module, name, WIDEST)


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    patch_type: torch.dtype = torch.float16,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    device_types: Sequence[str] | None = None,
) -> AmpHandle | NoOpHandle:
    """Switch on the casts of O1 and O4; ``amp.initialize`` calls this.

    Until ``handle._deactivate()`` autocast is in force in this thread, and in calls of initialized
    models in every thread. An earlier handle is deactivated first.

    Args:
        enabled: False gives a handle that does nothing. Decorated functions then stop casting. For
            everything else an earlier handle stays in force.
        loss_scale: ignored; kept for callers that pass it.
        patch_type: float16 or bfloat16.
        enable_caching: within one call of a model, cast each weight once.
        verbose: print every cast.
        allow_banned: run ``binary_cross_entropy`` of 16-bit values in float32 instead of raising.
        device_types: where to cast; default: the CPU and the accelerator, if there is one.

    Returns:
        The handle.

    Raises:
        RuntimeError: ``patch_type`` is neither float16 nor bfloat16.
    """
    global _DECORATOR_HANDLE
    if not enabled:
        _DECORATOR_HANDLE = NoOpHandle()
        return _DECORATOR_HANDLE
    if patch_type not in (torch.float16, torch.bfloat16):
        raise RuntimeError(
            f"amp.init: patch_type must be torch.float16 or torch.bfloat16, got {patch_type}."
        )
    changes = list_changes(patch_type)
    handle = AmpHandle(
        loss_scale, enable_caching, verbose, patch_type=patch_type, device_types=device_types
    )
    with _amp_state.changing:
        _put_in_force(handle, changes, allow_banned)
    return handle


def _put_in_force(handle: AmpHandle, changes: Registry, allow_banned: bool) -> None:
    """Replace functions and kernels of torch, and the handle that did so before."""
    earlier = getattr(_amp_state, "handle", None)
    registered = dict(getattr(earlier, "_registered", {}))
    replace_handle(handle)
    handle._undo.callback(handle._registered.clear)
    handle._registered.update(registered | _USER_CAST_REGISTRY | _USER_PROMOTE_REGISTRY)
    _USER_CAST_REGISTRY.clear()
    _USER_PROMOTE_REGISTRY.clear()
    changes |= handle._registered
    for (_, name), (module, dtype) in changes.items():
        make = functools.partial(_casting_as, dtype)
        handle._undo.enter_context(replaced(module, name, make))
    handle._undo.enter_context(cast_functions(except_for=changes))
    if handle._casting.dtype is torch.float16 and "cpu" in handle._casting.device_types:
        route_cpu_float16(handle)
    handle._undo.enter_context(cast_rules(handle._casting.device_types, allow_banned))
    handle._undo.enter_context(scriptable_forwards())
    handle._activate()


def replace_handle(handle: AmpHandle | NoOpHandle) -> None:
    """Undo what the handle in force has done, and put ``handle`` in its place."""
    global _DECORATOR_HANDLE
    earlier = getattr(_amp_state, "handle", None)
    if earlier is not None:
        earlier._deactivate()
    _amp_state.handle = _DECORATOR_HANDLE = handle


def route_cpu_float16(handle: AmpHandle | NoOpHandle) -> None:
    """Compute float16 products on the CPU in float32 until ``handle`` is deactivated."""
    handle._undo.enter_context(float16_through_float32())


def _register(registry: Registry, module: Any, name: str, dtype: Any) -> None:
    if not hasattr(module, name):
        raise ValueError(f"amp: cannot register {name!r}: {module!r} has no such function.")
    with _amp_state.changing:
        registry[id(module), name] = module, dtype


def _casting_as(dtype: Any, fn: Callable) -> Callable:
    return _casting(fn, dtype, is_registered=True, leaf=_is_of_torch(fn))


def _is_of_torch(fn: Any) -> bool:
    """Whether ``fn`` is built in, or written in Python inside of torch."""
    is_python = isinstance(fn, types.FunctionType)
    return not is_python or (fn.__module__ or "").partition(".")[0] == "torch"


def _casting(fn: Callable, dtype: Any, is_registered: bool = False, leaf: bool = False) -> Callable:
    """Cast the arguments of ``fn`` while casts are on; a ``leaf`` makes no casts of its own."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        handle = _amp_state.handle if is_registered else _DECORATOR_HANDLE
        if not handle.is_active():
            return fn(*args, **kwargs)
        target = _widest_dtype((args, kwargs)) if dtype is WIDEST else dtype
        cast = functools.partial(_cast, dtype=target)
        args, kwargs = applier(args, cast), applier(kwargs, cast)
        with handle._disable_casts() if leaf else contextlib.nullcontext():
            return fn(*args, **kwargs)

    return wrapper


def _decorator_helper(orig_fn: Callable, cast_fn: Callable, wrap_fn: Callable) -> Callable:
    """``wrap_fn(orig_fn, cast_fn, handle)`` at every call with the handle that is active then.

    ROCm's Apex has it; scripts use it together with :mod:`apex.amp.wrap`.
    """

    @functools.wraps(orig_fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        handle = _DECORATOR_HANDLE
        if not handle.is_active():
            return orig_fn(*args, **kwargs)
        cast = verbosify(cast_fn, orig_fn.__name__, handle.verbose)
        return wrap_fn(orig_fn, cast, handle)(*args, **kwargs)

    return wrapper


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if dtype is not None and _is_floating(value) else value


def _widest_dtype(values: Any) -> torch.dtype | None:
    dtypes: list[torch.dtype] = []

    def collect(value: Any) -> Any:
        if _is_floating(value):
            dtypes.append(value.dtype)
        return value

    applier(values, collect)
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None
