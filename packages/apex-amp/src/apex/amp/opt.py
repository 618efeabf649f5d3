"""The optimizer wrapper of the interface before ``amp.initialize``: ``handle.wrap_optimizer``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ._amp_state import Handle, master_params, maybe_print
from .gradients.backward import post_backward_models_are_masters, restore_grads, stash_grads
from .gradients.stash import overflow_notice
from .scaler import LossScaler

__all__ = ["OptimWrapper"]


class OptimWrapper:
    """An optimizer with a dynamic loss scale for each of the losses of an iteration.

    All other attributes are the optimizer's.

    Args:
        optimizer: any torch optimizer; it is not changed.
        amp_handle: of ``amp.init``. If its casts are off, losses are not scaled.
        num_loss: how many losses an iteration has; they are told apart by their order.

    Raises:
        ValueError: ``num_loss`` is not positive.

    Example:
        >>> handle = amp.init()
        >>> optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with optimizer.scale_loss(loss) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
    """

    def __init__(self, optimizer: torch.optim.Optimizer, amp_handle: Handle, num_loss: int) -> None:
        if not isinstance(num_loss, int) or num_loss < 1:
            raise ValueError(f"wrap_optimizer: num_loss must be a positive int, got {num_loss!r}.")
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0
        self._skip_next = [False] * num_loss
        self._loss_scaler = [LossScaler("dynamic") for _ in range(num_loss)]

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """Scale a loss for its backward pass; unscale the gradients, and add them to earlier ones.

        Args:
            loss: the next of the iteration's losses.

        Raises:
            RuntimeError: more than ``num_loss`` losses since the last step.

        An exception in the block leaves the gradients as they were before it.
        """
        handle = self._amp_handle
        if not handle.is_active():
            yield loss
            return
        if self._loss_idx >= self._num_loss:
            raise RuntimeError(
                f"OptimWrapper.scale_loss: more losses than num_loss={self._num_loss} in one step. "
                "Call step() once per iteration, or handle.wrap_optimizer(optimizer, num_loss=N)."
            )
        scaler = self._loss_scaler[self._loss_idx]
        params = list(master_params(self._optimizer))
        stash: list[torch.Tensor | None] = [None] * len(params)
        stash_grads(params, stash)
        try:
            with handle._backward():
                yield loss.float() * scaler.loss_scale()
        except BaseException:
            restore_grads(params, stash)
            raise
        scaler.clear_overflow_state()
        with torch.no_grad():
            post_backward_models_are_masters(scaler, params, stash)
        self._skip_next[self._loss_idx] = scaler.update_scale()
        self._loss_idx += 1
        handle._clear_cache()

    def step(self, closure: Callable | None = None) -> Any:
        """Step with casts off; or, if a loss of the iteration overflowed, do nothing.

        Raises:
            NotImplementedError: ``closure`` is given, and casts are on.
        """
        handle = self._amp_handle
        if not handle.is_active():
            return self._optimizer.step(closure=closure)
        if closure is not None:
            raise NotImplementedError(
                "OptimWrapper.step does not take a closure while casts are on. Compute the losses "
                "in scale_loss blocks, and call step without arguments."
            )
        overflows = [i for i, skip in enumerate(self._skip_next) if skip]
        self._loss_idx, self._skip_next = 0, [False] * self._num_loss
        for param in master_params(self._optimizer):
            handle.remove_cache(param)
        if overflows:
            for i in overflows:
                maybe_print(overflow_notice(i, self._loss_scaler[i].loss_scale()))
            return None
        with handle._disable_casts():
            return self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """The optimizer's."""
        return self._optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The optimizer's."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> Any:
        """The optimizer's."""
        return self._optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # not there yet
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return self._optimizer.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_optimizer" not in self.__dict__:
            raise RuntimeError(
                "OptimWrapper cannot be unpickled or copied: casts belong to the process. Pickle "
                "the optimizer, and call handle.wrap_optimizer again."
            )
        self._optimizer.__setstate__(state)

    def __repr__(self) -> str:
        return repr(self._optimizer)
