"""The schedule of one stage: each micro-batch's forward and backward, one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..utils import get_num_microbatches, listify_model
from .actions import actions
from .common import Batch, FwdStepFunc
from .loop import Loop

__all__ = ["forward_backward_no_pipelining", "placeholder_handler"]


@contextlib.contextmanager
def placeholder_handler() -> Iterator[None]:
    """A context that does nothing."""
    yield


def forward_backward_no_pipelining(
    forward_step_func: FwdStepFunc,
    batch: Batch,
    model: nn.Module | Sequence[nn.Module],
    *,
    forward_only: bool,
    dtype: torch.dtype | None = None,
    grad_scaler: Any = None,
    disable_autocast: bool = False,
    custom_sync_context_handler: Callable[[], Any] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run all micro-batches of one training step.

    Gradients are reduced in the last backward alone, if the model has a ``no_sync``, as torch's
    ``DistributedDataParallel`` has.

    Args:
        forward_step_func: called as ``(micro_batch, model)``; returns the output and a function
            that makes ``(loss, reduced)`` of it.
        batch: a list of tensors (or one tensor, or None) whose rows are this rank's samples, one
            micro-batch after the other.
        model: one module with ``set_input_tensor``, or a list with it.
        forward_only: no backward.
        dtype: float16 or bfloat16 turns autocast on.
        grad_scaler: its ``scale`` multiplies each loss.
        disable_autocast: leave autocast as it is.
        custom_sync_context_handler: makes the context of all micro-batches but the last, in place
            of ``no_sync``.
        kwargs: what only the other schedules use.

    Returns:
        What each micro-batch's loss function has reduced.

    Raises:
        RuntimeError: ``model`` is a list of another length.
    """
    models = listify_model(model)
    if len(models) != 1:
        raise RuntimeError(f"model: expected one module without a pipeline, got {len(models)}")
    number = get_num_microbatches()
    loop = Loop(
        forward_step_func,
        batch,
        models,
        forward_only=forward_only,
        dtype=dtype,
        grad_scaler=grad_scaler,
        disable_autocast=disable_autocast,
    )
    held_back: Any = custom_sync_context_handler
    held_back = held_back or getattr(models[0], "no_sync", placeholder_handler)
    plan = list(actions(0, 1, 1, number, forward_only))
    last = next(i for i, action in enumerate(plan) if action.microbatch == number - 1)
    if last:
        with held_back():
            loop.run(plan[:last], number)
    return loop.run(plan[last:], number)
