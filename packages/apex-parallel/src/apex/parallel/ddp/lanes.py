"""Lanes: what carries collectives (a process group and, on accelerators, a side stream)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import OwnGroup, take_groups


class Lane:
    """One process group, and one stream on accelerators (None on the CPU)."""

    def __init__(self, group: dist.ProcessGroup | None, stream: Any, device: torch.device) -> None:
        self.group, self.stream, self.device = group, stream, device
        self.event = None if stream is None else torch.get_device_module(device).Event()
        # NCCL's wait() orders streams and returns at once; any other backend blocks the caller,
        # who then does better to wait at the end of backward.
        self.wait_blocks = stream is None or "nccl" not in str(dist.get_backend(group))

    @functools.cached_property
    def ranks_averaged(self) -> int:
        """What ReduceOp.AVG divides by; 0 where the backend may not have it."""
        backend = type((self.group or dist.group.WORLD)._get_backend(self.device)).__name__
        known = backend in ("ProcessGroupGloo", "ProcessGroupNCCL")
        return dist.get_world_size(self.group) if known else 0

    def entered(self, after: Iterable[Any] = ()) -> Any:
        """Context: work issued inside runs on this lane, after what is queued on ``after``."""
        if self.stream is None:
            return nullcontext()
        for stream in after:
            self.stream.wait_stream(stream)
        return torch.get_device_module(self.device).stream(self.stream)

    def keep_until_done(self, tensors: Iterable[Tensor]) -> None:
        """Tell the allocator that this lane's stream reads the tensors."""
        if self.stream is not None:
            for tensor in tensors:
                tensor.record_stream(self.stream)

    def mark_done(self) -> None:
        """Record the point that :meth:`join` makes another stream wait for."""
        if self.event is not None:
            self.event.record(self.stream)

    def join(self) -> None:
        """Make the current stream wait for the last :meth:`mark_done`."""
        if self.event is not None:
            current_stream(self.device).wait_event(self.event)


def current_stream(device: torch.device) -> Any:
    """The current stream of an accelerator; None on the CPU, which has none."""
    return None if device.type == "cpu" else torch.get_device_module(device).current_stream(device)


def make_lanes(groups: Sequence[dist.ProcessGroup], device: torch.device) -> list[Lane]:
    """One lane per process group, with a new stream on accelerators.

    Args:
        device: where the gradients live.
    """
    if device.type == "cpu":
        return [Lane(group, None, device) for group in groups]
    make_stream = torch.get_device_module(device).Stream
    return [Lane(group, make_stream(device), device) for group in groups]


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

        Separate from :meth:`connect`, so that one rank alone may run a copy, for instance to
        evaluate it.
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
        """Note whether all collectives that began on the wrapper's own groups have succeeded."""
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


@contextmanager
def profiled(name: str) -> Iterator[None]:
    """A named range for torch.profiler, and for NVTX where CUDA is in use."""
    with torch.profiler.record_function(name):
        if not torch.cuda.is_available():
            yield
            return
        with torch.cuda.nvtx.range(name):
            yield
