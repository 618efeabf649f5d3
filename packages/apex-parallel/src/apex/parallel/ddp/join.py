"""Uneven inputs: a rank that has none left takes part in the reductions of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from .broadcast import broadcast_tensors

if TYPE_CHECKING:
    from .reducer import GradientReducer


class JoinConfig(NamedTuple):
    """What torch's ``Join`` tells a wrapper, and reads again when that notifies it."""

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False


NOT_JOINING = JoinConfig()
"""Of a wrapper outside of every ``Join``."""


def tell_joined_ranks(reducer: GradientReducer, is_reduced: bool, divide_by_all: bool) -> None:
    """Say what this forward's backward will do, to ranks without inputs; a collective call.

    Args:
        is_reduced: the backward is reduced.
        divide_by_all: average over all ranks, not over those that have inputs.
    """
    active, *_ = _exchange(reducer, 1, int(is_reduced), int(reducer.needs_refresh))
    reducer.divisor = None if divide_by_all else active


def _exchange(reducer: GradientReducer, *numbers: int) -> list[int]:
    """The sums over ranks."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=reducer.lane_set.device)
    dist.all_reduce(mine)
    return mine.tolist()


class ReducerJoinHook(JoinHook):
    """What a rank without inputs does in the place of a forward and backward.

    Args:
        wrapper: whose module it is.
    """

    def __init__(self, wrapper: Any, divide_by_all: bool) -> None:
        self._wrapper, self._divide_by_all = wrapper, divide_by_all

    def main_hook(self) -> None:
        """Add zeros to every bucket of the others, if they reduce any."""
        reducer = self._wrapper._reducer
        active, reduced, refreshed = _exchange(reducer, 0, 0, 0)
        if reduced:
            reducer.divisor = None if self._divide_by_all else active
            reducer.needs_refresh = reducer.needs_refresh or refreshed > 0
            reducer.shadow_backward()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the parameters and buffers of a rank that had inputs until the end."""
        wrapper = self._wrapper
        wrapper._reducer.divisor = None
        wrapper._join_config = NOT_JOINING  # forwards need not tell anybody any more
        device, rank = wrapper._reducer.lane_set.device, dist.get_rank()
        last = torch.tensor(rank if is_last_joiner else -1, device=device)
        dist.all_reduce(last, dist.ReduceOp.MAX)
        module = wrapper.module
        broadcast_tensors((*module.parameters(), *module.buffers()), int(last))
