"""Errors of collectives that say which rank was at what, and what to do; gloo tells an address."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

__all__ = ["explained"]


@contextlib.contextmanager
def explained(
    what: str, group: dist.ProcessGroup | None = None, *, who: str = "", other: str = ""
) -> Iterator[None]:
    """Have errors of a collective inside name this rank, the collective, and a remedy.

    Put it around collectives alone: every ``RuntimeError`` inside is taken for one of theirs.

    Args:
        what: the collective, such as "the sum of the losses".
        group: over which it goes; by default all ranks.
        who: what this rank is to its user, such as "pipeline stage 2"; its number is added.
        other: who may have failed; by default the other ranks of the group, by number.

    Raises:
        RuntimeError: from the backend's error.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        rank = dist.get_rank()
        raise RuntimeError(
            f"{f'{who} (rank {rank})' if who else f'rank {rank}'}: {what} failed. "
            f"{other or _others(rank, group)} has died, has raised an error (see its output), or "
            "took longer than the timeout of the process group. End all ranks and start again "
            f"from a checkpoint; torchrun with --max-restarts does both. The backend says: {error}"
        ) from error


def _others(rank: int, group: dist.ProcessGroup | None) -> str:
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    others = [str(other) for other in ranks if other != rank]
    return f"Rank {others[0]}" if len(others) == 1 else f"One of the ranks {', '.join(others)}"
