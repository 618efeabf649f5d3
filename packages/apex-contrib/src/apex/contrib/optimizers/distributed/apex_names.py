"""Private names of Apex's module that others import from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from .arguments import devices_match as _devices_match
from .collectives import (
    Works as _CoalescingManager,
)
from .collectives import (
    _coalescing_manager,
    _coalescing_manager_append_work,
)
from .held_values import join
from .parameters import copy_all
from .planner import round_to_multiple as _round_to_multiple

__all__ = [
    "_CoalescingManager",
    "_bf16_rem_to_fp32",
    "_coalescing_manager",
    "_coalescing_manager_append_work",
    "_devices_match",
    "_disable_pre_forward_hook",
    "_multi_tensor_copy",
    "_round_to_multiple",
]


def _multi_tensor_copy(
    buffers_in: list[Tensor], buffers_out: list[Tensor], dummy_overflow_buf: Tensor | None = None
) -> None:
    """Copy each tensor of one list into the other's, cast, in as few launches as torch can."""
    copy_all(buffers_in, buffers_out)


@contextmanager
def _disable_pre_forward_hook(param: Tensor) -> Iterator[None]:
    """Context in which reading ``param`` starts nothing; here reading never does."""
    yield


def _bf16_rem_to_fp32(bf16: Tensor, rem: Tensor, fp32: Tensor) -> None:
    """Write the float32 values that bfloat16 upper halves and int16 lower halves stand for."""
    fp32.copy_(join(bf16, rem))
