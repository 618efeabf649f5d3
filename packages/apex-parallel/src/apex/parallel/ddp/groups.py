"""Process groups that belong to one wrapper each, and pass to later wrappers when it is gone."""

from __future__ import annotations

import atexit
import functools
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class OwnGroup:
    """A process group of all ranks that one owner at a time runs collectives on."""

    group: dist.ProcessGroup
    owner: weakref.ref
    settled: bool = True  # no collective on it is under way or has failed

    def is_free(self) -> bool:
        """Whether no owner on this rank needs it any more."""
        return self.settled and self.owner() is None


# By default process group; forgotten with it. No lock: taking groups is collective, in one thread.
_groups: weakref.WeakKeyDictionary[Any, list[OwnGroup]] = weakref.WeakKeyDictionary()


def take_groups(count: int, owner: object, device: torch.device) -> list[OwnGroup]:
    """``count`` groups for ``owner`` alone, until it is garbage; a collective call.

    On the default group, ranks whose backwards differ would issue the collectives of several
    wrappers and of SyncBatchNorm in different orders. Owners are garbage collected at different
    times on different ranks, so the ranks agree on which groups are free. Groups are never
    destroyed: that would run a collective in the garbage collector.

    Args:
        device: a device whose tensors the default group can reduce.
    """
    _let_threads_finish_at_exit()
    known = _groups.setdefault(dist.group.WORLD, [])
    free: list[OwnGroup] = []
    if known:
        votes = torch.tensor([own.is_free() for own in known], dtype=torch.int64, device=device)
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        free = [own for own, vote in zip(known, votes.tolist(), strict=True) if vote]
    timeout = _timeout(device)
    while len(free) < count:
        known.append(OwnGroup(dist.new_group(timeout=timeout), weakref.ref(owner)))
        free.append(known[-1])
    for own in free[:count]:
        own.owner = weakref.ref(owner)
    return free[:count]


@functools.cache
def _let_threads_finish_at_exit() -> None:
    """Give Gloo's threads time to free what they have finished, before the interpreter ends.

    Since torch 2.13 a collective that follows a backward holds a Python object (its context). The
    thread that frees it then needs the interpreter; if that is ending, the process aborts: 5 of 100
    short scripts did, on two cores.
    """
    atexit.register(time.sleep, 0.05)


def _timeout(device: torch.device) -> timedelta | None:
    """The default group's, which ``new_group`` does not pass on; None where it does not tell."""
    options = getattr(dist.group.WORLD._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)
