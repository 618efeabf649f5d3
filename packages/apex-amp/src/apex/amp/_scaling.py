"""The parts of ``amp.scale_loss``: checks of its arguments, and what it does around the block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._amp_state import _amp_state
from ._checks import is_optimizer
from .scaler import LossScaler


def optimizer_list(optimizers: Any) -> list[Any]:
    """The argument of ``scale_loss`` as a list, or ``TypeError``."""
    items = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    for i, optimizer in enumerate(items):
        if not is_optimizer(optimizer):
            raise TypeError(
                "amp.scale_loss: optimizers must be a torch.optim.Optimizer, an "
                f"apex.parallel.LARC, or a list of them; got {type(optimizer).__name__} at {i}."
            )
    return items


def scaler_of(loss_id: int) -> LossScaler:
    """The loss scaler of a loss, or ``ValueError``."""
    count = len(_amp_state.loss_scalers)
    if not isinstance(loss_id, int) or not 0 <= loss_id < count:
        raise ValueError(
            f"amp.scale_loss: loss_id must be an int in [0, {count}), got {loss_id!r}. "
            "amp.initialize(..., num_losses=N) makes room for N losses."
        )
    return _amp_state.loss_scalers[loss_id]


def have_masters(optimizers: Sequence[Any]) -> bool:
    """Whether one of them has master weights, maybe from an earlier call of ``initialize``."""
    stashes = (getattr(optimizer, "_amp_stash", None) for optimizer in optimizers)
    return any(stash is not None and stash.has_masters for stash in stashes)


def check_are_initialized(optimizers: Sequence[Any]) -> None:
    """Raise ``RuntimeError`` for an optimizer that amp has not seen."""
    for i, optimizer in enumerate(optimizers):
        if not hasattr(optimizer, "_amp_stash"):
            raise RuntimeError(
                f"amp.scale_loss: optimizers[{i}] ({type(optimizer).__name__}) was not given to "
                "amp.initialize. Pass it there, and use the optimizer that comes back."
            )


def prepare(optimizers: Sequence[Any], delay_unscale: bool) -> None:
    """Put gradients of earlier backward passes aside."""
    for optimizer in optimizers:
        optimizer._amp_lazy_init()
        # Gradients that are still scaled stay in place: autograd adds to them.
        if not optimizer._amp_stash.params_have_scaled_gradients and not delay_unscale:
            optimizer._prepare_amp_backward()


def finish(
    optimizers: Sequence[Any],
    scaler: LossScaler,
    loss_id: int,
    delay_unscale: bool,
    delay_overflow_check: bool,
) -> None:
    """Unscale gradients, adapt the loss scale, and let optimizers skip their step if need be."""
    if delay_unscale:
        for optimizer in optimizers:
            optimizer._amp_stash.params_have_scaled_gradients = True
        return
    scaler.clear_overflow_state()
    for optimizer in optimizers:
        optimizer._post_amp_backward(scaler)
        optimizer._amp_stash.params_have_scaled_gradients = False
    if delay_overflow_check:
        scaler.delay_check()
        note_iteration(loss_id, scaler.loss_scale(), False)
        return
    scale = scaler.loss_scale()
    is_skipped = scaler.update_scale()
    note_iteration(loss_id, scale, is_skipped)
    if is_skipped:
        for optimizer in optimizers:
            optimizer._amp_stash.skip_next_step(loss_id, scaler.loss_scale(), scale)


def watched(loss: torch.Tensor, scaled_loss: torch.Tensor) -> torch.Tensor:
    """The scaled loss, whose backward pass a running ``amp.debug`` watches."""
    if _amp_state.debugger is not None:
        _amp_state.debugger.before_backward(loss, scaled_loss)
    return scaled_loss


def note_iteration(loss_id: int, loss_scale: float, is_skipped: bool) -> None:
    """Tell a running ``amp.debug`` that a block has ended."""
    if _amp_state.debugger is not None:
        _amp_state.debugger.after_backward(loss_id, loss_scale, is_skipped)
