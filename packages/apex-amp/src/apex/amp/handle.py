"""Loss scaling around a backward pass, and the handles that switch casts on and off."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ._amp_state import _amp_state
from .casting.autocast import Casting, device_types_in_use
from .casting.functions import static_or_class_method
from .gradients.scale_loss import (
    GradientsAside,
    have_masters,
    note_iteration,
    optimizer_list,
    scaler_of,
    still_in_need,
    watched,
)
from .opt import OptimWrapper

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "scale_loss"]


@contextlib.contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: torch.nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:
    """Scale a loss for its backward pass, and unscale the gradients afterwards.

    On exit the gradients of the parameters that the optimizers update (``amp.master_params``) are
    unscaled, in float32 where amp made master weights, and added to what earlier backward passes
    left. If one is inf or NaN, the loss scale is reduced and the next ``optimizer.step()`` of each
    of ``optimizers`` does nothing.

    Casts of O1 and O4 are off inside the block, except in calls of models: the formulas of the
    backward pass choose their dtypes in the forward pass.

    Args:
        loss: any shape, any floating-point dtype.
        optimizers: the optimizer, or list of all optimizers, whose parameters receive gradients.
        loss_id: which loss scaler; below the ``num_losses`` of ``amp.initialize``.
        model: ignored; kept for callers that pass it.
        delay_unscale: leave the gradients scaled, for accumulation over several backward passes
            with one scale; the last pass of an iteration must not set it.
        delay_overflow_check: unscale, but let the next block look for overflows. If it finds an
            overflow from this block, the optimizers of this block skip their next step, unless they
            have stepped in the meantime.

    Yields:
        ``loss.float() * scale``; the loss itself if amp is not enabled.

    Raises:
        RuntimeError: ``amp.initialize`` was not called, or was not given one of ``optimizers``; or
            this block is nested in another block of one of them.
        TypeError, ValueError: an argument is of the wrong type, or ``loss_id`` out of range.

    After an exception inside the block, the loss scale and the gradients are as before the block.
    There is one exception: after a block with ``delay_unscale``, a backward pass adds to the
    gradients in place.

    Example:
        >>> with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        >>> optimizer.step()
    """
    properties = getattr(_amp_state, "opt_properties", None)
    if properties is None:
        raise RuntimeError(
            "amp.scale_loss: amp is not initialized. Call "
            "`model, optimizer = amp.initialize(model, optimizer, opt_level=...)` first."
        )
    options = properties.options  # its attributes are computed
    if not options["enabled"]:
        optimizers = still_in_need(optimizers)
        if not optimizers:
            yield watched(loss, loss)
            note_iteration(loss_id, 1.0, False)
            return
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"amp.scale_loss: loss must be a tensor, got {type(loss).__name__}.")
    optimizers = optimizer_list(optimizers)
    scaler = scaler_of(loss_id)
    handle = _amp_state.handle
    try:
        scale = scaler.loss_scale()
        is_plain = scale == 1.0 and not scaler.dynamic and not options["master_weights"]
        if is_plain and not have_masters(optimizers):
            with handle._backward():
                yield watched(loss, loss.float())
            note_iteration(loss_id, 1.0, False)
            return
        delays = {"unscale": delay_unscale, "overflow_check": delay_overflow_check}
        with GradientsAside(optimizers, scaler, loss_id, delays), handle._backward():
            scaled_loss = loss.float() * scale
            yield scaled_loss if _amp_state.debugger is None else watched(loss, scaled_loss)
    finally:
        handle._clear_cache()


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Run a block, also model calls in it, without the casts of O1 and O4; may be nested.

    Does nothing where no casts are in force. ``optimizer.step`` runs in such a block already.
    """
    handle = getattr(_amp_state, "handle", None)
    with handle._disable_casts() if handle is not None else contextlib.nullcontext():
        yield


class _Handle:
    """Undoes what amp changed in torch; a copied model or optimizer shares its process's handle."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def __deepcopy__(self, memo: dict) -> _Handle:
        return self

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """The optimizer with loss scaling, for scripts that do not use ``amp.initialize``.

        Args:
            optimizer: any torch optimizer. If casts are off, its losses are not scaled.
            num_loss: how many losses an iteration has.
        """
        return OptimWrapper(optimizer, self, num_loss)

    def _deactivate(self) -> None:
        """Undo everything: casts, replaced functions, kernels, environment.

        Call it in the thread that called ``amp.initialize``: autocast's state belongs to a thread.
        """
        with _amp_state.changing:
            self._undo.close()


class NoOpHandle(_Handle):
    """The handle of levels that cast no functions; it only undoes what amp changed in torch."""

    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        """Whether functions cast their arguments: never."""
        return False

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> Iterator[torch.Tensor]:
        """Yield ``loss`` as it is."""
        yield loss

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    _enable_casts = _backward = _model_call = _disable_casts

    def _clear_cache(self) -> None:
        """There is no cache."""

    def _leave_thread(self) -> None:
        """No thread's state was changed."""


class AmpHandle(_Handle):
    """The casts of O1 and O4: autocast, switched on from ``init`` until ``_deactivate``.

    Args:
        loss_scale: ignored here; ``amp.initialize`` makes the loss scalers.
        enable_caching: within one call of a model, cast each weight once.
        verbose: print every cast.
        patch_type: float16 or bfloat16.
        device_types: where to cast; default: the CPU and the accelerator, if there is one.
    """

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
        *,
        patch_type: torch.dtype = torch.float16,
        device_types: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        devices = device_types_in_use() if device_types is None else device_types
        casting = self._casting = Casting(patch_type, devices, enable_caching, verbose)
        # Contexts; not methods of this class, which would be a frame more in each step.
        self._disable_casts, self._enable_casts = casting.disabled, casting.enabled
        self._backward, self._model_call = casting.backward, casting.model_call
        self._cache: dict[torch.Tensor, torch.Tensor] = {}
        self._registered: dict[tuple[int, str], Any] = {}  # user functions that are replaced

    def is_active(self) -> bool:
        """Whether functions cast their arguments in this thread."""
        return self._casting.is_active()

    @property
    def _is_active(self) -> bool:
        """Whether casts are in force; False switches them off in all threads, True on again.

        Scripts for Apex set it in their own copies of :func:`disable_casts`.
        """
        return self._casting.is_on and not self._casting.is_paused

    @_is_active.setter
    def _is_active(self, value: bool) -> None:
        self._casting.pause(not value)

    @property
    def has_cache(self) -> bool:
        """Whether casts of weights are kept where that is sound."""
        return self._casting.cache_enabled

    @property
    def cache(self) -> dict[torch.Tensor, torch.Tensor]:
        """Casts that the wrappers of :mod:`apex.amp.wrap` keep: parameter -> its cast."""
        return self._cache

    def remove_cache(self, param: torch.Tensor) -> None:
        """Forget the cast of a parameter, if there is one."""
        self._cache.pop(param, None)

    @property
    def verbose(self) -> bool:
        """Whether casts are printed."""
        return self._casting.verbose

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> Iterator[torch.Tensor]:
        """The interface before ``amp.initialize``.

        Raises:
            RuntimeError: always; use ``amp.scale_loss``.
        """
        raise RuntimeError(
            "handle.scale_loss is an interface from before amp.initialize. Call "
            "`amp.initialize(model, optimizer, opt_level=...)` and then "
            "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`."
        )
        yield loss

    def _activate(self) -> None:
        self._undo.enter_context(self._casting.wrapped_autograd())
        self._casting.activate()
        self._undo.callback(self._casting.deactivate)

    def _clear_cache(self) -> None:
        self._cache.clear()
        torch.clear_autocast_cache()

    def _save_func(self, mod: Any, fn: str, func: Any) -> None:
        """Have ``mod.fn`` be ``func`` again after :meth:`_deactivate`."""
        if isinstance(mod, dict):
            self._undo.callback(mod.__setitem__, fn, func)
        elif fn in vars(mod):
            self._undo.callback(setattr, mod, fn, static_or_class_method(mod, fn) or func)
        else:  # inherited from a base class
            self._undo.callback(delattr, mod, fn)

    def _leave_thread(self) -> None:
        self._casting.leave_thread()


def _after_fork_in_child() -> None:
    # A forked child inherits the thread's autocast state. Most such children are workers of a data
    # loader, whose transforms must not run in 16 bits. Models that are called there still cast.
    handle = getattr(_amp_state, "handle", None)
    if handle is not None:
        handle._leave_thread()
    type(_amp_state).changing = threading.RLock()  # its holder may be a thread that the child lacks


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
