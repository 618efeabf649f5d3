"""Searches shared by all processes of the default group, where there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

Key = TypeVar("Key")
Found = TypeVar("Found")


def _world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gathered(own: Any) -> list[Any]:
    """What each process gives, in the order of ranks; all processes call it."""
    _, world_size = _world()
    if world_size == 1:
        return [own]
    everything: list[Any] = [None] * world_size
    dist.all_gather_object(everything, own)
    return everything


def shared_search(keys: Sequence[Key], search: Callable[[Key], Found]) -> dict[Key, Found]:
    """Search for key ``i`` on rank ``i % world``; every process returns what all have found.

    Raises:
        RuntimeError: a search failed on some process; on all of them, with its rank and the error.
    """
    rank, world_size = _world()
    failure, found = None, {}
    try:
        found = {key: search(key) for key in keys[rank::world_size]}
    except Exception as error:
        if world_size == 1:
            raise
        failure = error
    answers = gathered((found, failure and f"{type(failure).__name__}: {failure}"))
    for other, (_, text) in enumerate(answers):
        if text is not None:
            raise RuntimeError(f"permutation search failed on rank {other}: {text}") from failure
    everything = {key: value for of_rank, _ in answers for key, value in of_rank.items()}
    return {key: everything[key] for key in keys}
