"""Streams of a device that is simulated: what is launched runs later, in any order that is allowed.

In place of ``apex.contrib.torchsched.queues.CudaQueues``, for graphs on the CPU.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any


class SimulatedQueues:
    """Makes the launches of each call, and runs them at its end.

    Attributes:
        count: streams of the graph that was compiled last, the caller's included.
        launches: of each call.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random, self.count = random.Random(seed), 1
        self.launches: list[SimulatedLaunches] = []

    def __call__(self, device: Any, count: int) -> SimulatedQueues:
        self.count = count
        return self

    @contextlib.contextmanager
    def begin(self, values: dict[str, Any]) -> Iterator[SimulatedLaunches]:
        """Collect launches; then run them as late as streams and events allow."""
        self.launches.append(SimulatedLaunches(self.count, values, self.random))
        yield self.launches[-1]
        self.launches[-1].drain()


class SimulatedLaunches:
    """Streams as lists of things to do; the caller's stream runs first wherever it can.

    Attributes:
        made_by: the stream that makes each value, by name.
        kept: names, and the streams for which their memory is kept.
    """

    def __init__(self, count: int, values: dict[str, Any], random: random.Random) -> None:
        self.streams: list[list[tuple[str, Any]]] = [[] for _ in range(count)]
        self.values, self.random = values, random
        self.events: dict[int, dict[str, bool]] = {}
        self.made_by, self.kept = dict.fromkeys(values, 0), set[tuple[str, int]]()

    def record(self, number: int, stream: int) -> None:
        self.events[number] = {"is_done": False}
        self.streams[stream].append(("record", self.events[number]))

    def wait(self, stream: int, numbers: Sequence[int]) -> None:
        # A GPU would go on where nothing was recorded; here that is a KeyError.
        self.streams[stream] += [("wait", self.events[number]) for number in numbers]

    def keep(self, names: Sequence[str], stream: int) -> None:
        self.kept.update((name, stream) for name in names)

    def part(self, part: Any, is_recorded: bool) -> None:
        self.wait(part.stream, part.waits)
        others = {name for name in part.inputs if self.made_by[name] != part.stream}
        assert others == set(part.foreign)
        self.streams[part.stream].append(("run", part))
        self.made_by |= dict.fromkeys(part.outputs, part.stream)
        if is_recorded:
            self.record(part.number, part.stream)

    def drain(self) -> None:
        """Go on until the caller's stream is through: who has not waited finds nothing."""
        while self.streams[0]:
            side = [s for s in range(1, len(self.streams)) if self.streams[s]]
            self.random.shuffle(side)
            assert any(self._step(stream) for stream in [0, *side]), "no stream can go on"

    def _step(self, stream: int) -> bool:
        """Do the first thing of a stream; False if it has to wait."""
        what, thing = self.streams[stream][0]
        if what == "wait" and not thing["is_done"]:
            return False
        del self.streams[stream][0]
        if what == "record":
            thing["is_done"] = True
        elif what == "run":
            outputs = thing.run([self.values[name] for name in thing.inputs])
            self.values.update(zip(thing.outputs, outputs, strict=True))
        return True
