"""How the parts of a graph are launched on CUDA's streams: events, and memory that others use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import config
from .inductor._utils import get_cuda_stream_pool


@dataclass(frozen=True)
class Part:
    """A part of a graph: what it takes and gives, by name, and what runs it.

    Attributes:
        stream: the number of its stream; 0 is the caller's.
        number: of its last node in the schedule; others wait for the event of that number.
        waits: the numbers that its stream waits for.
        foreign: those of its inputs that another stream made, or the caller.
        released: what nobody needs after it.
    """

    stream: int
    number: int
    waits: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    foreign: tuple[str, ...]
    released: tuple[str, ...]
    run: Callable[[list[Any]], Sequence[Any]]


class CudaQueues:
    """Streams of one device for one compiled graph; stream 0 is the caller's, at each call.

    Args:
        device: a CUDA device.
        count: streams, the caller's included.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        pool = get_cuda_stream_pool(device)
        self._side_streams = [pool.acquire() for _ in range(count - 1)]
        self._events: dict[int, torch.cuda.Event] = {}

    @contextlib.contextmanager
    def begin(self, values: dict[str, Any]) -> Iterator[CudaLaunches]:
        """Launch one call of the graph, whose tensors are ``values``."""
        events = self._events if config.reuse_cuda_event else {}
        with torch.cuda.device(self._device):
            streams = [torch.cuda.current_stream(), *self._side_streams]
            yield CudaLaunches(streams, events, values)


class CudaLaunches:
    """The launches of one call."""

    def __init__(
        self,
        streams: Sequence[torch.cuda.Stream],
        events: dict[int, torch.cuda.Event],
        values: dict[str, Any],
    ) -> None:
        self._streams, self._events, self._values = streams, events, values

    def record(self, number: int, stream: int) -> None:
        """Record the event of a number at the present end of a stream."""
        if number not in self._events:
            self._events[number] = torch.cuda.Event()
        self._events[number].record(self._streams[stream])

    def wait(self, stream: int, numbers: Sequence[int]) -> None:
        """Let a stream wait for events."""
        for number in numbers:
            self._streams[stream].wait_event(self._events[number])

    def keep(self, names: Sequence[str], stream: int) -> None:
        """Tell the allocator that a stream uses tensors which another stream's pool holds."""
        for name in names:
            self._values[name].record_stream(self._streams[stream])

    def part(self, part: Part, is_recorded: bool) -> None:
        """Launch a part on its stream, behind its waits, and record its event."""
        self.wait(part.stream, part.waits)
        self.keep([n for n in part.foreign if self._values[n].is_cuda], part.stream)
        inputs = [self._values[name] for name in part.inputs]
        for name in part.released:
            del self._values[name]
        with torch.cuda.stream(self._streams[part.stream]):
            outputs = part.run(inputs)
        self._values.update(zip(part.outputs, outputs, strict=True))
        if is_recorded:
            self.record(part.number, part.stream)
