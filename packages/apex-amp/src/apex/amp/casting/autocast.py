"""Autocast for one handle: in force in the thread that activated it, and in every model call."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._amp_state import maybe_print
from .functions import replaced

# torch 2.10 also keeps a cast made under no_grad, and gives it to code that needs gradients.
_CACHE_MINDS_GRAD_MODE = torch.__version__ >= (2, 11)


class _ThreadState(threading.local):
    """The state of one thread; torch keeps the state of autocast per thread, too."""

    def __init__(self) -> None:
        self.ambient: contextlib.ExitStack | None = None  # casts are on outside of model calls
        self.disabled_depth = 0  # nested disable_casts blocks
        self.is_in_backward = False  # casts are off for the C++ formulas of a backward pass
        self.call_depth = 0  # nested calls of models


class Casting:
    """Switches autocast on and off for a dtype and some device types.

    Args:
        dtype: float16 or bfloat16.
        device_types: such as ``("cpu", "cuda")``.
        cache_enabled: within a model call, cast each weight once however often it is used; not
            with torch 2.10, whose cache would lose gradients.
        verbose: print every cast of a floating-point tensor.
    """

    def __init__(
        self, dtype: torch.dtype, device_types: Sequence[str], cache_enabled: bool, verbose: bool
    ) -> None:
        self.dtype = dtype
        self.device_types = tuple(device_types)
        self.cache_enabled = cache_enabled
        self.verbose = verbose
        self.is_on = False
        self.is_paused = False
        self._thread = _ThreadState()

    def __deepcopy__(self, memo: dict) -> Casting:
        return self  # a copied model or optimizer shares the process's casts

    def activate(self) -> None:
        """Switch casts on in this thread until :meth:`deactivate`."""
        self.is_on = True
        ambient = contextlib.ExitStack()
        # Without a cache: a weight that changes outside of amp's sight must not stay cast.
        ambient.enter_context(self._autocast(enabled=True, cache_enabled=False))
        self._thread.ambient = ambient

    def deactivate(self) -> None:
        """Switch casts off for good, and restore this thread's autocast state."""
        self.is_on = False
        self.leave_thread()

    def leave_thread(self) -> None:
        """Keep casts for model calls only, in this thread."""
        ambient, self._thread.ambient = self._thread.ambient, None
        if ambient is not None:
            ambient.close()

    def is_active(self) -> bool:
        """Whether functions cast their arguments in this thread, now or in the next model call."""
        if torch.compiler.is_compiling():
            # Dynamo cannot read thread-local objects, but it guards on autocast's own state.
            return self.is_on and any(torch.is_autocast_enabled(d) for d in self.device_types)
        return self.is_on and not self.is_paused and self._thread.disabled_depth == 0

    def pause(self, is_paused: bool) -> None:
        """Switch casts off, in this thread at once and in model calls of all threads; or on again.

        One function may begin a pause, and another may end it.
        """
        if is_paused == self.is_paused:
            return
        self.is_paused = is_paused
        self._apply_pause()

    def _apply_pause(self) -> None:
        thread = self._thread
        is_ambient = thread.ambient is not None and not thread.is_in_backward
        if self.is_on and (is_ambient or thread.call_depth) and not thread.disabled_depth:
            for device_type in self.device_types:
                torch.set_autocast_enabled(device_type, not self.is_paused)

    def model_call(self) -> contextlib.AbstractContextManager[None]:
        """Casts for one call of a model, in any thread, unless they were switched off."""
        thread = self._thread
        if not self.is_on or thread.disabled_depth:
            return contextlib.nullcontext()
        cached = self.cache_enabled and _CACHE_MINDS_GRAD_MODE
        if thread.ambient is not None and not thread.is_in_backward:
            return _WeightCache(thread, cached)
        return _Block(self, True, cached, call_depth=thread.call_depth + 1)

    def disabled(self) -> contextlib.AbstractContextManager[None]:
        """No casts in this thread, nor in model calls."""
        if torch.compiler.is_compiling():
            return self._autocast(enabled=False)
        return _Block(self, False, disabled_depth=self._thread.disabled_depth + 1)

    def enabled(self) -> contextlib.AbstractContextManager[None]:
        """Casts again, within :meth:`disabled`; for the closure of a step."""
        return _Block(self, self.is_on, disabled_depth=0)

    def backward(self) -> contextlib.AbstractContextManager[None]:
        """No casts, except in model calls.

        Autograd's formulas go through autocast as well: the backward pass of a float32 region would
        run in 16 bits if casts stayed on.
        """
        return _Block(self, False, is_in_backward=True, call_depth=0)

    @contextlib.contextmanager
    def wrapped_autograd(self) -> Iterator[None]:
        """Every backward pass runs in :meth:`backward`, wherever it is called.

        This replaces the function that ``Tensor.backward``, ``torch.autograd.backward`` and
        ``grad`` all call. So it reaches a ``grad`` that a script has imported by name, and Dynamo
        still recognizes the three.
        """
        with contextlib.ExitStack() as undo:
            # Both names, because torch.compiler saves one of them and restores it to the other.
            for module in (torch.autograd.graph, torch.autograd):
                undo.enter_context(replaced(module, "_engine_run_backward", self._without_casts))
            yield

    def _without_casts(self, run_backward: Callable) -> Callable:
        @functools.wraps(run_backward)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not any(map(torch.is_autocast_enabled, self.device_types)):
                return run_backward(*args, **kwargs)
            with self.backward():
                return run_backward(*args, **kwargs)

        return wrapper

    def _autocast(
        self, enabled: bool, cache_enabled: bool = False
    ) -> contextlib.AbstractContextManager[Any]:
        if len(self.device_types) == 1 and not (enabled and self.verbose):
            (device_type,) = self.device_types
            return torch.autocast(
                device_type, dtype=self.dtype, enabled=enabled, cache_enabled=cache_enabled
            )
        return self._several(enabled, cache_enabled)

    @contextlib.contextmanager
    def _several(self, enabled: bool, cache_enabled: bool) -> Iterator[None]:
        """Autocast of several devices, or one that tells of its casts."""
        with contextlib.ExitStack() as stack:
            for device_type in self.device_types:
                context = torch.autocast(
                    device_type, dtype=self.dtype, enabled=enabled, cache_enabled=cache_enabled
                )
                stack.enter_context(context)
            if enabled and self.verbose:
                stack.enter_context(_CastPrinter())
            yield


class _Block:
    """The state of autocast, and that of this thread, for a block.

    A pause that begins or ends in the block outlasts it. Half the frames that a generator takes,
    and none of torch.autocast's where casts are off.
    """

    def __init__(
        self, casting: Casting, enabled: bool, cache_enabled: bool = False, **state: int
    ) -> None:
        self._casting, self._enabled, self._cache_enabled = casting, enabled, cache_enabled
        self._state = state

    def __enter__(self) -> None:
        casting, self._autocast = self._casting, None
        self._was_paused = casting.is_paused
        if self._enabled and not self._was_paused:
            self._autocast = casting._autocast(True, self._cache_enabled)
            self._autocast.__enter__()
        else:  # what torch.autocast(enabled=False) does for each device
            self._devices, self._had_cache = [], torch.is_autocast_cache_enabled()
            for device in casting.device_types:
                before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
                self._devices.append((device, *before))
                torch.set_autocast_enabled(device, False)
                torch.set_autocast_dtype(device, casting.dtype)
            torch.set_autocast_cache_enabled(False)
            torch.autocast_increment_nesting()
        thread, self._before = vars(casting._thread), {}
        for name in self._state:
            self._before[name] = thread[name]
        thread.update(self._state)

    def __exit__(self, *error: Any) -> None:
        casting = self._casting
        vars(casting._thread).update(self._before)
        try:
            if self._autocast is not None:
                self._autocast.__exit__(*error)
                return
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            for device, enabled, dtype in self._devices:
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_cache_enabled(self._had_cache)
        finally:
            if casting.is_paused is not self._was_paused:
                casting._apply_pause()


class _WeightCache:
    """Autocast's cache in a model call, emptied before and after: weights and grad mode change."""

    def __init__(self, thread: _ThreadState, enabled: bool) -> None:
        self._thread, self._enabled = thread, enabled

    def __enter__(self) -> None:
        self._before = torch.is_autocast_cache_enabled()
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(self._enabled)
        self._thread.call_depth += 1

    def __exit__(self, *error: Any) -> None:
        self._thread.call_depth -= 1
        torch.set_autocast_cache_enabled(self._before)
        torch.clear_autocast_cache()


class _CastPrinter(TorchDispatchMode):
    """Prints every change of a floating-point dtype, for ``verbosity=2``."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default:
            source = args[0]
            if source.is_floating_point() and source.dtype is not result.dtype:
                before, after = (str(t.dtype).removeprefix("torch.") for t in (source, result))
                maybe_print(f"amp: cast {before} to {after}: {list(source.shape)} {source.device}")
        return result


def device_types_in_use(tensors: Sequence[torch.Tensor] = ()) -> tuple[str, ...]:
    """The device types to cast on: those of ``tensors``, and the accelerator if there is one.

    A model may move to the accelerator later. The CPU is included only if a tensor is on it, or if
    there are no tensors: if the model is on a GPU, the CPU prepares data, which must not be cast.
    """
    found = {t.device.type for t in tensors} - {"meta"} or {"cpu"}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        found.add(accelerator.type)
    return tuple(sorted(d for d in found if torch.amp.is_autocast_available(d)))
