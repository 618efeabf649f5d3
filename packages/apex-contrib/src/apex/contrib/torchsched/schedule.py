"""Which stream each node of a graph runs on, and which events keep the nodes in order.

A pure function of costs and dependencies: no torch, no device. The longest path stays on stream 0,
the one that the caller is on; the rest goes to side streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ENTRANCE = -1
"""The place on stream 0 before the first node: whatever the caller has launched there."""


@dataclass(frozen=True)
class Schedule:
    """Streams and events of the nodes ``0`` to ``N - 1``, which are launched in this order.

    Attributes:
        streams: the stream of each node; 0 is the caller's.
        waits: for each node, the nodes (or :data:`ENTRANCE`) after which events were recorded that
            the node's stream waits for, before the node.
        final_waits: the nodes for whose events stream 0 waits after the last node, so that all is
            done when the caller's stream goes on.
    """

    streams: tuple[int, ...]
    waits: tuple[tuple[int, ...], ...]
    final_waits: tuple[int, ...]

    @property
    def recorded(self) -> frozenset[int]:
        """The nodes (or :data:`ENTRANCE`) after which an event is recorded, on their stream."""
        return frozenset(self.final_waits).union(*self.waits)


@dataclass(frozen=True)
class Run:
    """Consecutive nodes of one stream: waits come before the first, events after the last."""

    stream: int
    nodes: tuple[int, ...]
    waits: tuple[int, ...]


def longest_path(costs: Sequence[float], dependencies: Sequence[Sequence[int]]) -> list[int]:
    """The nodes of the dependency path with the largest sum of costs, from its first to its last.

    Of equal paths it is the one whose last node, and then each node before, has the least number.
    """
    through: list[float] = []  # the largest sum of a path that ends here
    before: list[int | None] = []
    for node, cost in enumerate(costs):
        last = min(dependencies[node], key=lambda d: (-through[d], d), default=None)
        before.append(last)
        through.append(cost + (0 if last is None else through[last]))
    node = max(range(len(through)), key=lambda n: (through[n], -n), default=None)
    path: list[int] = []
    while node is not None:
        path.append(node)
        node = before[node]
    return path[::-1]


def schedule(
    costs: Sequence[float],
    dependencies: Sequence[Sequence[int]],
    num_streams: int,
    least_cost: float = 0.0,
) -> Schedule:
    """Assign nodes to streams, and find the events that keep their order.

    A node off the longest path goes where it needs no event, behind a dependency that is the last
    node of a side stream; else to the side stream that is free first. A node waits for an event
    only where no other wait implies it.

    Args:
        costs: the time of each node, ``>= 0``, in any unit.
        dependencies: for each node, the earlier nodes that it needs.
        num_streams: streams to use, the caller's included; ``>= 1``.
        least_cost: a node off the longest path that costs less goes to the stream of the dependency
            that ends last, because an event costs more than it could win.

    Raises:
        ValueError: ``num_streams`` is less than 1, a cost is negative or not a number, lengths
            differ, or a node depends on itself or a later one.

    Source:
        Kwok & Ahmad 1999, *Static Scheduling Algorithms for Allocating Directed Task Graphs*,
        section 6 (list scheduling by the critical path); Fidge 1988 and Mattern 1989 (vector
        clocks, by which waits are left out).

    Example:
        >>> found = schedule([1, 5, 2, 1], [[], [0], [0], [1, 2]], num_streams=2)
        >>> found.streams, found.waits, found.final_waits
        ((0, 0, 1, 0), ((), (), (0,), (2,)), ())
    """
    _check(costs, dependencies, num_streams)
    streams = _assigned(costs, dependencies, num_streams, least_cost)
    # How many nodes of each stream are known to be done: at a stream's end, and after each node.
    # Stream 0 begins with the entrance.
    at_end = [[0] * num_streams for _ in range(num_streams)]
    at_end[0][0] = 1
    after = {ENTRANCE: at_end[0].copy()}
    place = {ENTRANCE: (0, 1)}
    counts = [1] + [0] * (num_streams - 1)

    def wanted(known: list[int], nodes: Sequence[int]) -> tuple[int, ...]:
        waits = []
        for node in sorted(set(nodes), reverse=True):  # a later event may imply an earlier one
            of, number = place[node]
            if known[of] < number:
                waits.append(node)
                known[:] = map(max, known, after[node])
        return tuple(sorted(waits))

    waits = []
    for node, stream in enumerate(streams):
        known = at_end[stream]
        waits.append(wanted(known, [*dependencies[node], ENTRANCE]))
        counts[stream] += 1
        known[stream] = counts[stream]
        place[node], after[node] = (stream, counts[stream]), known.copy()
    ends = {stream: node for node, stream in enumerate(streams)}
    return Schedule(tuple(streams), tuple(waits), wanted(at_end[0], list(ends.values())))


def runs(found: Schedule) -> list[Run]:
    """Put nodes of a stream together that have no event between them, in the order of launches."""
    result: list[Run] = []
    last: dict[int, int] = {}  # the place in `result` of each stream's last run
    for node, stream in enumerate(found.streams):
        place = last.get(stream)
        open_run = None if place is None else result[place]
        if open_run is None or found.waits[node] or open_run.nodes[-1] in found.recorded:
            last[stream] = len(result)
            result.append(Run(stream, (node,), found.waits[node]))
        else:
            result[last[stream]] = Run(stream, (*open_run.nodes, node), open_run.waits)
    return result


def _assigned(
    costs: Sequence[float],
    dependencies: Sequence[Sequence[int]],
    num_streams: int,
    least_cost: float,
) -> list[int]:
    on_path = set(longest_path(costs, dependencies))
    free = [0.0] * num_streams  # when each stream ends what it has
    last: list[int | None] = [None] * num_streams
    streams: list[int] = []
    ends: list[float] = []
    for node, cost in enumerate(costs):
        needed = sorted(dependencies[node], key=lambda d: (-ends[d], d))
        behind = [streams[d] for d in needed if streams[d] and last[streams[d]] == d]
        if num_streams == 1 or node in on_path:
            stream = 0
        elif behind:
            stream = behind[0]
        elif cost < least_cost:
            stream = streams[needed[0]] if needed else 0
        else:
            stream = min(range(1, num_streams), key=lambda s: (free[s], s))
        begin = max([free[stream], *(ends[d] for d in needed)])
        streams.append(stream)
        ends.append(begin + cost)
        free[stream], last[stream] = begin + cost, node
    return streams


def _check(costs: Sequence[float], dependencies: Sequence[Sequence[int]], num_streams: int) -> None:
    if num_streams < 1:
        raise ValueError(f"schedule: num_streams must be at least 1, got {num_streams}.")
    if len(costs) != len(dependencies):
        raise ValueError(
            f"schedule: costs has {len(costs)} nodes and dependencies {len(dependencies)}; "
            "expected as many."
        )
    for node, (cost, needed) in enumerate(zip(costs, dependencies, strict=True)):
        if not cost >= 0:
            raise ValueError(f"schedule: costs[{node}] must be at least 0, got {cost}.")
        if not all(0 <= d < node for d in needed):
            raise ValueError(
                f"schedule: dependencies[{node}] must be earlier nodes, got {list(needed)}. Number "
                "nodes so that each comes after those it needs."
            )
