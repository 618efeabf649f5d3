"""The parts of ``amp.scale_loss``: checks of its arguments, and work before and after the block."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._amp_state import _amp_state
from ..masters.checks import inner_optimizer, is_optimizer
from ..scaler import LossScaler


def optimizer_list(optimizers: Any) -> list[Any]:
    """The argument of ``scale_loss`` as a list, or ``TypeError``."""
    items = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    for i, optimizer in enumerate(items):
        if not (isinstance(optimizer, torch.optim.Optimizer) or is_optimizer(optimizer)):
            raise TypeError(
                "amp.scale_loss: optimizers must be a torch.optim.Optimizer, an "
                f"apex.parallel.LARC, or a list of them; got {type(optimizer).__name__} at {i}."
                f"{inner_optimizer(optimizer)}"
            )
    return list(dict(zip(map(id, items), items, strict=True)).values())  # each once


def scaler_of(loss_id: int) -> LossScaler:
    """The loss scaler of a loss, or ``ValueError``."""
    if not _amp_state.opt_properties.options["enabled"]:
        return LossScaler(1.0)
    count = len(_amp_state.loss_scalers)
    if not (type(loss_id) is int or _is_integer(loss_id)) or not 0 <= loss_id < count:
        raise ValueError(
            f"amp.scale_loss: loss_id must be an int in [0, {count}), got {loss_id!r}. "
            "amp.initialize(..., num_losses=N) makes room for N losses."
        )
    return _amp_state.loss_scalers[loss_id]


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)  # numpy's integers, too
    except TypeError:
        return False
    return True


def still_in_need(optimizers: Any) -> list[Any]:
    """The optimizers whose gradients amp must unscale although it is not enabled: usually none.

    An optimizer may have master weights from a call of ``initialize`` before amp was switched off.
    It steps on the masters' gradients, which amp alone fills.
    """
    items = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    initialized = [item for item in items if hasattr(item, "_amp_stash")]
    return initialized if have_masters(initialized) else []


def have_masters(optimizers: Sequence[Any]) -> bool:
    """Whether one of them has master weights, maybe from an earlier call of ``initialize``."""
    for optimizer in optimizers:
        stash = getattr(optimizer, "_amp_stash", None)
        if stash is not None and stash.has_masters:
            return True
    return False


class GradientsAside:
    """Puts gradients of earlier backward passes aside for a block, and adds them afterwards.

    Args:
        optimizers: each once; the list is sorted into the order in which they are unscaled.
        scaler: of the loss.
        loss_id: its number.
        delays: whether ``"unscale"`` and ``"overflow_check"`` are left to a later block.
    """

    def __init__(
        self, optimizers: list[Any], scaler: LossScaler, loss_id: int, delays: dict[str, bool]
    ) -> None:
        self._optimizers = optimizers
        self._at_end = scaler, loss_id, delays
        self._turns: list[tuple[Any, list[torch.Tensor]]] = []

    def __enter__(self) -> None:
        optimizers = self._optimizers
        _check_can_begin(optimizers)
        for optimizer in optimizers:
            optimizer._amp_lazy_init()
        for optimizer in optimizers:
            stash = optimizer._amp_stash
            stash.is_in_block = True
            # zero_grad may have been called after a delayed unscaling.
            if stash.params_have_scaled_gradients and not stash.has_grads():
                stash.drop_scaled_grads()
        try:
            self._turns = [(optimizers[0], [])] if len(optimizers) == 1 else _turns(optimizers)
            for optimizer, hidden in self._turns:
                # Gradients that are still scaled stay in place: autograd adds to them.
                if optimizer._amp_stash.params_have_scaled_gradients:
                    continue
                if hidden:
                    _without_grads(hidden, optimizer._prepare_amp_backward)
                else:  # without a frame more
                    optimizer._prepare_amp_backward()
        except BaseException as error:
            self.__exit__(type(error))
            raise

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        try:
            if failure is None:
                _finish(self._turns, *self._at_end)
                return
            for optimizer, hidden in self._turns:
                _without_grads(hidden, optimizer._abort_amp_backward)
        finally:
            for optimizer in self._optimizers:
                optimizer._amp_stash.is_in_block = False


def _turns(optimizers: list[Any]) -> list[tuple[Any, list[torch.Tensor]]]:
    """The optimizers in order, each with the parameters that an optimizer before it unscales.

    Unscaling works in place. So a gradient is unscaled once, even if several optimizers have it.
    """
    # The optimizer that kept the unscaled part of a gradient must add it back after unscaling.
    optimizers.sort(key=lambda o: not o._amp_stash.params_have_scaled_gradients)
    turns, seen = [], set()
    for optimizer in optimizers:
        params = optimizer._amp_stash.unscaled_in_place()
        ids = set(map(id, params))
        turns.append((optimizer, [p for p in params if id(p) in seen] if ids & seen else []))
        seen |= ids
    return turns


def _without_grads(
    params: Sequence[torch.Tensor], method: Callable[..., None], *arguments: Any
) -> None:
    """Call a method of an optimizer that does not see the gradients of some parameters."""
    if not params:
        method(*arguments)
        return
    grads = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        method(*arguments)
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad


def _check_can_begin(optimizers: Sequence[Any]) -> None:
    """Raise ``RuntimeError`` for an optimizer that amp has not seen, or that is in a block."""
    for i, optimizer in enumerate(optimizers):
        if not hasattr(optimizer, "_amp_stash"):
            raise RuntimeError(
                f"amp.scale_loss: optimizers[{i}] ({type(optimizer).__name__}) was not given to "
                "amp.initialize. Pass it there, and use the optimizer that comes back."
            )
        if optimizer._amp_stash.is_in_block:
            raise RuntimeError(
                f"amp.scale_loss: optimizers[{i}] ({type(optimizer).__name__}) is in a scale_loss "
                "block already. Close that block first: gradients of several blocks, one after "
                "another, add up. For one backward pass of several losses, scale their sum."
            )


def _keep_scaled(optimizer: Any) -> None:
    """Leave gradients scaled for a later block."""
    if optimizer._amp_stash.has_grads():
        optimizer._amp_stash.params_have_scaled_gradients = True
    else:  # the loss did not reach it
        optimizer._abort_amp_backward()


def _finish(
    turns: Sequence[tuple[Any, list[torch.Tensor]]],
    scaler: LossScaler,
    loss_id: int,
    delays: dict[str, bool],
) -> None:
    """Unscale gradients, adapt the loss scale, and after an overflow let optimizers skip a step."""
    if delays["unscale"]:
        for optimizer, hidden in turns:
            _without_grads(hidden, _keep_scaled, optimizer)
        return
    scaler.clear_overflow_state()
    for optimizer, hidden in turns:
        if hidden:
            _without_grads(hidden, optimizer._post_amp_backward, scaler)
        else:
            optimizer._post_amp_backward(scaler)
        optimizer._amp_stash.params_have_scaled_gradients = False
    optimizers = list(map(operator.itemgetter(0), turns))
    if delays["overflow_check"]:
        scaler.delay_check(optimizers)
        for optimizer in optimizers:
            optimizer._amp_stash.check_is_delayed = True
        note_iteration(loss_id, scaler.loss_scale(), False)
        return
    scale = scaler.loss_scale()
    is_skipped = scaler.update_scale()
    if _amp_state.debugger is not None:
        note_iteration(loss_id, scale, is_skipped)
    if not is_skipped:
        return
    late = [o for o in scaler.late_overflows if o._amp_stash.check_is_delayed]
    is_here = scaler._has_overflow or not scaler.late_overflows
    for optimizer in (*late, *(optimizers if is_here else ())):
        optimizer._amp_stash.skip_next_step(loss_id, scaler.loss_scale(), scale)


def watched(loss: torch.Tensor, scaled_loss: torch.Tensor) -> torch.Tensor:
    """The scaled loss, whose backward pass a running ``amp.debug`` watches."""
    if _amp_state.debugger is not None and isinstance(loss, torch.Tensor):
        _amp_state.debugger.before_backward(loss, scaled_loss)
    return scaled_loss


def note_iteration(loss_id: int, loss_scale: float, is_skipped: bool) -> None:
    """Tell a running ``amp.debug`` that a block has ended."""
    if _amp_state.debugger is not None:
        _amp_state.debugger.after_backward(loss_id, loss_scale, is_skipped)
