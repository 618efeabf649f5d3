"""Links of apex.optimizers.CPUOffload whose device is the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_COPY_SPEED = 4e9  # bytes/s of a copy of one thread, about


class LazyLink:
    """Copies nothing before somebody waits for it: who has not waited finds what was there before.

    Attributes:
        log: what was asked for and done: ("receive" or "send", elements of its tensors), or
            ("wait", the way of what was waited for).
        fails: ways on which the next copy will not arrive.
    """

    is_pinned = False

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.fails: set[str] = set()
        self._ahead: dict[str, list[LazyTrip]] = {"receive": [], "send": []}

    def receive(self, hosts: Sequence[Tensor], devices: Sequence[Tensor]) -> LazyTrip:
        return self._go("receive", hosts, devices)

    def send(self, hosts: Sequence[Tensor], devices: Sequence[Tensor]) -> LazyTrip:
        return self._go("send", devices, hosts)

    def join(self) -> None:
        for trip in list(self._ahead["send"]):
            trip.synchronize()

    def _go(self, way: str, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> LazyTrip:
        torch.autograd.graph.increment_version(list(targets))
        self.log.append((way, [tensor.numel() for tensor in sources]))
        trip = LazyTrip(self, way, [(_memory(t), s) for t, s in zip(targets, sources, strict=True)])
        trip.fails = way in self.fails
        self.fails.discard(way)
        self._ahead[way].append(trip)
        return trip


@dataclasses.dataclass(eq=False)
class LazyTrip:
    link: LazyLink
    way: str
    pairs: list[tuple[Tensor, Tensor]]
    fails: bool = False

    def synchronize(self) -> None:
        """Copy it, and what was asked for before on the same way."""
        ahead = self.link._ahead[self.way]
        while self in ahead:
            trip = ahead.pop(0)
            self.link.log.append(("wait", trip.way))
            if not trip.fails:
                for target, source in trip.pairs:
                    target.copy_(source.detach())
        if self.fails:
            raise RuntimeError("the link failed")


class SimulatedLink:
    """Two threads that copy as late as they can.

    Args:
        speed: bytes/s of each way; 0: no time is simulated.
        delay: seconds until the first byte of a copy arrives.
        copies: whether anything is copied. A GPU does so itself; here it takes cores from others.
    """

    is_pinned = False

    def __init__(self, speed: float = 0.0, delay: float = 0.0, copies: bool = True) -> None:
        self._ways = {way: _Way(speed, delay, copies) for way in ("receive", "send")}
        self._sent: list[_Trip] = []

    def receive(self, hosts: Sequence[Tensor], devices: Sequence[Tensor]) -> _Trip:
        return self._go("receive", hosts, devices)

    def send(self, hosts: Sequence[Tensor], devices: Sequence[Tensor]) -> _Trip:
        trip = self._go("send", devices, hosts)
        self._sent.append(trip)
        return trip

    def join(self) -> None:
        trips, self._sent = self._sent, []
        for trip in trips:
            trip.synchronize()

    def _go(self, way: str, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> _Trip:
        torch.autograd.graph.increment_version(list(targets))
        trip = _Trip([_memory(t) for t in targets], [_memory(t) for t in sources])
        self._ways[way].queue.put(trip)
        return trip


class _Trip:
    def __init__(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        self.targets, self.sources = targets, sources
        self.done, self.asked = threading.Event(), time.perf_counter()

    def synchronize(self) -> None:
        assert self.done.wait(60), "the link hangs"


class _Way:
    def __init__(self, speed: float, delay: float, copies: bool) -> None:
        self._speed, self._delay, self._copies, self._free = speed, delay, copies, 0.0
        self.queue: queue.Queue[_Trip] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            trip = self.queue.get()
            size = sum(tensor.nbytes for tensor in trip.sources)
            if self._speed:
                self._free = max(self._free, trip.asked) + size / self._speed
            end = max(self._free, trip.asked) + self._delay
            if self._copies:
                _sleep_until(end - size / _COPY_SPEED)
                for target, source in zip(trip.targets, trip.sources, strict=True):
                    _copy(target, source)
            _sleep_until(end)
            trip.targets, trip.sources = [], []
            trip.done.set()


def _copy(target: Tensor, source: Tensor) -> None:
    if target.stride() == source.stride():  # and without gaps, or it would have no mirror
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)  # one thread
    else:
        target.copy_(source)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def _memory(tensor: Tensor) -> Tensor:
    """The same memory, with a version counter of its own: changes count when they are asked for."""
    made = torch.empty(0, dtype=tensor.dtype)
    storage, place = tensor.untyped_storage(), tensor.storage_offset()
    return made.set_(storage, place, tensor.size(), tensor.stride())
