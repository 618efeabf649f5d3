"""The lanes of one wrapper: process groups of its own, or those that it was given."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .groups import OwnGroup, take_groups
from .lanes import Lane, make_lanes


class LaneSet:
    """The lanes of a wrapper; none until :meth:`connect` and :meth:`open`."""

    def __init__(self) -> None:
        self.device: torch.device | None = None  # where the parameters lie
        self.lanes: list[Lane] = []
        self._own_groups: list[OwnGroup] = []
        self._world: weakref.ref | None = None

    def connect(self, device: torch.device) -> None:
        """Attach to the default process group, without lanes yet."""
        self.device, self.lanes, self._own_groups = device, [], []
        self._world = weakref.ref(dist.group.WORLD)

    def is_connected(self) -> bool:
        """Whether the default process group is still the same; it may be made again."""
        return self._world is not None and self._world() is dist.group.WORLD

    def open(self, count: int, communicators: tuple[Sequence[Any], Sequence[Any]] | None) -> None:
        """Take ``communicators``, or get ``count`` process groups, which is a collective call.

        Not part of attaching, so that one rank may run a copy, for instance to evaluate it.
        """
        if communicators is not None:
            pairs = zip(*communicators, strict=True)
            self.lanes = [Lane(group, stream, self.device) for group, stream in pairs]
            return
        self._own_groups = take_groups(count, self, self.device)
        self.lanes = make_lanes([own.group for own in self._own_groups], self.device)

    def lane(self, bucket_idx: int, force_default_stream: bool = False) -> Lane:
        """The lane of a bucket; with ``force_default_stream`` the first group, on no stream."""
        if force_default_stream:
            return Lane(self.lanes[0].group, None, self.device)
        return self.lanes[bucket_idx % len(self.lanes)]

    def settle(self, settled: bool) -> None:
        """Note whether the collectives begun on the wrapper's own groups have all ended well."""
        for own in self._own_groups:
            own.settled = settled

    def join(self) -> None:
        """Make the current stream wait for all lanes."""
        for lane in self.lanes:
            lane.join()

    @property
    def bucket_streams(self) -> list[Any]:
        """The streams that buckets rotate over; None entries on the CPU."""
        return [lane.stream for lane in self.lanes]

    @property
    def bucket_events(self) -> list[Any]:
        """For each stream, the event recorded after its last bucket; None entries on the CPU."""
        return [lane.event for lane in self.lanes]

    @property
    def bucket_pgs(self) -> list[dist.ProcessGroup]:
        """The process groups that buckets rotate over."""
        return [lane.group for lane in self.lanes]
