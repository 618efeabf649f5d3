"""How many threads a step on the CPU takes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


def share_of_cores() -> int:
    """The cores that this process may use, divided among the processes of this host.

    ``torchrun`` counts these in ``LOCAL_WORLD_SIZE``, and gives each one thread unless told
    otherwise.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, cores // max(1, int(ranks) if ranks.isdecimal() else 1))


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch's operators take so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
