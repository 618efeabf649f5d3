"""The one object that holds amp's process-wide state, and the helpers that read it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch

from .scaler import LossScaler


class Options(Protocol):
    """What amp reads of the options in force, which are a ``frontend.Properties``."""

    enabled: bool
    master_weights: bool | None


class Handle(Protocol):
    """What switches casts on and off: an ``AmpHandle``, or a ``NoOpHandle`` that has none."""

    def is_active(self) -> bool:
        """Whether functions cast their arguments in this thread."""

    def _disable_casts(self) -> AbstractContextManager[None]: ...
    def _enable_casts(self) -> AbstractContextManager[None]: ...
    def _backward(self) -> AbstractContextManager[None]: ...
    def _model_call(self) -> AbstractContextManager[None]: ...
    def _clear_cache(self) -> None: ...
    def _leave_thread(self) -> None: ...
    def _deactivate(self) -> None: ...


class AmpState:
    """What ``amp.initialize`` decided, for the functions that are called later.

    Attributes:
        hard_override: set it to True to turn refusals about options into printed warnings.
        allow_incoming_model_not_fp32: set it to True to skip the check of the models' dtypes.
        verbosity: 0 is silent; see :func:`apex.amp.initialize`.
        opt_properties: the options in force; absent before ``initialize``.
        loss_scalers: one :class:`~apex.amp.scaler.LossScaler` per loss; absent likewise.
        min_loss_scale, max_loss_scale: bounds of dynamic scaling; absent likewise.
        handle: switches casts on and off; absent before ``initialize`` or ``init``.
        models: weak references to the models of the last ``initialize``; absent likewise.
        debugger: what a running :func:`apex.amp.debug` watches with, else None.
        changing: held by the thread that changes this state or replaces functions of torch. Two
            that replace functions at once would each take the other's for torch's own. Training
            only reads, and takes no lock.
    """

    changing: ClassVar[Any] = threading.RLock()  # of the class: copies of the state have none
    opt_properties: Options
    loss_scalers: list[LossScaler]
    min_loss_scale: float | None
    max_loss_scale: float | None
    handle: Handle
    models: list[weakref.ref[torch.nn.Module]]
    debugger: Any

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.debugger = None


_amp_state = AmpState()


def warn_or_err(msg: str) -> None:
    """Raise ``RuntimeError(msg)``, or print it as a warning if ``_amp_state.hard_override``."""
    if not _amp_state.hard_override:
        raise RuntimeError(msg)
    maybe_print(f"Warning: {msg}")


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print ``msg`` unless verbosity is 0; with ``rank0`` only on the first process."""
    if _amp_state.verbosity <= 0:
        return
    has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not (rank0 and has_ranks and torch.distributed.get_rank() != 0):
        print(msg)


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """Iterate over the parameters that ``optimizer`` updates: float32 masters where amp made some.

    Use it to clip or inspect gradients after a :func:`~apex.amp.scale_loss` block, where the
    gradients of these parameters are unscaled.

    Args:
        optimizer: an optimizer that was given to ``amp.initialize``, or any other.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
