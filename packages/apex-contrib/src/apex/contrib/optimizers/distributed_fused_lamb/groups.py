"""Process groups of ranks in nodes: within a node, and between nodes."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..distributed.collectives import Groups
from .arguments import NAME

__all__ = ["NodeGroups", "get_process_group_ranks"]


def get_process_group_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """The global ranks of a process group; of None, all."""
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


class NodeGroups(Groups):
    """The groups of this rank; each kind several times, so that blocks may be under way at once.

    Every rank has to make them, in the same order. They stand in place of the base class's
    ``distributed`` and ``redundant``.

    Args:
        node_size: ranks per node, whose consecutive ranks share the optimizer's state; 0: as many
            as there are local devices.
        counts: how many groups there are to be within a node, between nodes, and for gathering; 0
            of the last: those within a node serve.
        full_ar: the second kind is of all ranks instead.
        channels: the most channels of NCCL in gathers; 0 leaves that to NCCL.

    Raises:
        ValueError: ``node_size`` does not divide the number of ranks.
    """

    def __init__(
        self,
        device: torch.device,
        node_size: int,
        counts: tuple[int, int, int],
        full_ar: bool,
        channels: int,
    ) -> None:
        super().__init__(None, None, None, NAME)
        self.shards = node_size or min(_local_devices(device, self.size), self.size)
        if self.size % self.shards:
            raise ValueError(
                f"{NAME}: dwu_group_size must divide the number of ranks, {self.size}, got "
                f"{self.shards}."
            )
        self.copies = self.size // self.shards
        self.copy, self.shard = divmod(self.rank, self.shards)
        within = [list(range(n * self.shards, (n + 1) * self.shards)) for n in range(self.copies)]
        between = [list(range(s, self.size, self.shards)) for s in range(self.shards)]
        self.within = self._made(counts[0], within)
        everyone = [list(range(self.size))]
        self.between = self._made(counts[1], everyone if full_ar else between)
        self.gathering = self.within
        if counts[2]:
            limited = channels and device.type == "cuda" and dist.get_backend() == "nccl"
            options = _limited_channels if limited else None
            self.gathering = self._made(counts[2], within, options, channels)

    def _made(
        self,
        count: int,
        lists: list[list[int]],
        options: Callable[[int], object] | None = None,
        channels: int = 0,
    ) -> list[dist.ProcessGroup]:
        """``count`` groups, of the list that has this rank; the first of all ranks is the world."""
        if len(lists[0]) == 1:
            return []
        made = []
        for i in range(count):
            if len(lists) == 1 and i == 0 and options is None:
                made.append(dist.group.WORLD)
                continue
            for ranks in lists:
                group = dist.new_group(ranks, pg_options=options(channels) if options else None)
                if self.rank in ranks:
                    made.append(group)
        return made


def _local_devices(device: torch.device, world: int) -> int:
    if device.type == "cuda":
        return torch.cuda.device_count()
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def _limited_channels(channels: int) -> object:
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = channels
    return options
