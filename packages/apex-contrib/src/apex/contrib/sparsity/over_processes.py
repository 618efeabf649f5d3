"""Searches shared by all processes of the default group, where there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    answers: list[Any] = [None] * world_size
    dist.all_gather_object(answers, own)
    return answers


@dataclass(frozen=True)
class Share:
    """What one process has found, by key, or why it failed."""

    found: dict[Any, Any]
    failure: Exception | None


def own_share(keys: Sequence[Key], search: Callable[[Key], Found]) -> Share:
    """Search for key ``i`` if this is rank ``i % world``. :func:`everything` tells of a failure."""
    rank, world_size = _world()
    try:
        return Share({key: search(key) for key in keys[rank::world_size]}, None)
    except Exception as error:
        if world_size == 1:
            raise
        return Share({}, error)


def everything(share: Share) -> dict[Any, Any]:
    """What all processes have found, on each of them.

    Raises:
        RuntimeError: a search failed on some process; on all of them, with its rank and the error.
    """
    failure = share.failure
    answers = gathered((share.found, failure and f"{type(failure).__name__}: {failure}"))
    for other, (_, text) in enumerate(answers):
        if text is not None:
            raise RuntimeError(f"permutation search failed on rank {other}: {text}") from failure
    return {key: value for found, _ in answers for key, value in found.items()}
