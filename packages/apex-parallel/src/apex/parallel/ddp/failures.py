"""Errors that say which rank has failed, in what, and what to do; backends tell only an address."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from .checks import NAME

ANSWER_S = 2.0  # for which a rank waits for the others to say that they have failed too


@contextmanager
def explained(what: Callable[[], str], errors: type[RuntimeError] = RuntimeError) -> Iterator[None]:
    """Turn what torch.distributed raises inside into an error that names ranks and a remedy.

    Args:
        what: says what is under way.
        errors: which errors come from torch.distributed. Gloo has only RuntimeError.

    Raises:
        RuntimeError: from the backend's error.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except errors as error:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        silent = _silent_ranks(rank, world_size)
        if silent is None:
            whose = "The store of the process group does not answer either: the process that holds"
            whose += " it, by default rank 0, has ended."
        elif silent:
            whose = f"No word from rank {', '.join(map(str, silent))} for {ANSWER_S:g} s, so look"
            whose += " at what these printed: they have ended, or are busy elsewhere."
        else:
            whose = "All ranks report such an error, so either one of them has started other"
            whose += " collectives than the rest, or the network between them failed."
        raise RuntimeError(
            f"{NAME}: rank {rank} of {world_size} failed in {what()}. {whose} The process group "
            "cannot be used any more. End all ranks and start again from a checkpoint; torchrun "
            f"with --max-restarts does both. The backend says: {error}"
        ) from error


def _silent_ranks(rank: int, world_size: int) -> list[int] | None:
    """The ranks that do not report a failure in time; None if the store is gone."""
    try:
        store = dist.distributed_c10d._get_default_store()
        keys = {other: f"apex/ddp/failed/{other}" for other in range(world_size)}
        store.set(keys[rank], "1")
        deadline = time.monotonic() + ANSWER_S
        silent = [other for other in range(world_size) if other != rank]
        while silent and time.monotonic() < deadline:
            time.sleep(0.05)
            silent = [other for other in silent if not store.check([keys[other]])]
    except RuntimeError:
        return None
    return silent
