"""Errors of collectives that say which rank failed in what, and what to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

__all__ = ["explained"]

ANSWER_S = 2.0  # for which a rank waits for the others to say that they have failed too


@contextmanager
def explained(
    what: str | Callable[[], str],
    group: dist.ProcessGroup | None = None,
    *,
    who: str = "",
    others: Sequence[int] | None = None,
    errors: type[RuntimeError] = RuntimeError,
) -> Iterator[None]:
    """Have errors of a collective inside name this rank, the collective, who is gone, and a remedy.

    Put it around collectives alone: every one of ``errors`` inside is taken for one of theirs.

    Args:
        what: the collective, such as "the sum of the losses"; or a function that says it.
        group: over which it goes; by default all ranks.
        who: what this rank is to its user, such as "pipeline stage 2"; its number is added.
        others: the ranks that may have failed; by default those of the group.
        errors: which errors come from torch.distributed. Gloo has only RuntimeError.

    Raises:
        RuntimeError: from the backend's error.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except errors as error:
        rank = dist.get_rank()
        if others is None:
            others = dist.get_process_group_ranks(group or dist.group.WORLD)
        lost = _lost(rank, sorted({*others} - {rank}))
        raise RuntimeError(
            f"{f'{who} (rank {rank})' if who else f'rank {rank}'}: "
            f"{what if isinstance(what, str) else what()} failed. {lost} The process group cannot "
            "be used any more. End all ranks and start again from a checkpoint; torchrun with "
            f"--max-restarts does both. The backend says: {error}"
        ) from error


def _lost(rank: int, others: list[int]) -> str:
    """Which of the others report no failure, and what that means."""
    silent = _silent_ranks(rank, others)
    if silent is None:
        return (
            "The store of the process group does not answer either: the process that holds it, by "
            "default rank 0, has ended."
        )
    if silent:
        return (
            f"No word from rank {', '.join(map(str, silent))} for {ANSWER_S:g} s, so look at what "
            "these printed: they have ended, or are busy elsewhere."
        )
    return (
        f"Rank {', '.join(map(str, others))} failed too, so look at whom they name. If nobody is "
        "named, ranks have started different collectives, or the network between them failed."
    )


def _silent_ranks(rank: int, others: list[int]) -> list[int] | None:
    """Those of the others that do not report a failure in time; None if the store is gone."""
    key = "apex/failed/{}".format
    try:
        store = dist.distributed_c10d._get_default_store()
        has_asked = store.check([key(rank)])
        store.set(key(rank), "1")
        deadline = time.monotonic() + (0 if has_asked else ANSWER_S)
        while True:
            others = [other for other in others if not store.check([key(other)])]
            if not others or time.monotonic() >= deadline:
                return others
            time.sleep(0.05)
    except RuntimeError:
        return None
