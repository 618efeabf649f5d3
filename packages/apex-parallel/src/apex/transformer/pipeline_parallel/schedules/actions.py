"""What each rank of a pipeline does, and in which order: forward, backward, send, receive.

Orders of computation are those of Narayanan et al. 2021, *Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM*, section 2.2: one forward, one backward; with several
chunks of the model on a rank, interleaved.
"""

from __future__ import annotations

import enum
import functools
import heapq
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Action", "Kind", "actions"]


class Kind(enum.Enum):
    """What an action does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND = "send"
    RECV = "receive"


class Action(NamedTuple):
    """One action of one rank.

    ``what`` is the direction: FORWARD for a forward, and for the transfer of its output; BACKWARD
    for a backward, and for the transfer of a gradient. ``chunk`` is the one on this rank whose
    output or gradient is computed or sent, or whose input or gradient is received. ``peer`` is the
    stage at the other end of a transfer.
    """

    kind: Kind
    what: Kind
    microbatch: int
    chunk: int
    peer: int | None = None


Unit = tuple[Action, ...]  # computations with no transfer between them


def actions(
    rank: int, pp: int, chunks: int, microbatches: int, forward_only: bool = False
) -> Iterator[Action]:
    """The actions of stage ``rank`` of ``pp`` stages, in order.

    Messages between two ranks arrive in the order in which they are sent, and there is one order
    of all transfers of all ranks that agrees with every rank's own. So ranks do not wait for each
    other in a circle, even where a send returns only when it has been received. For the same
    reason a rank may start transfers that follow each other, with no computation between them, at
    the same time.

    Args:
        rank: from 0 to ``pp - 1``.
        pp: number of stages.
        chunks: parts of the model on each rank. Part ``c`` of rank ``r`` is number ``c * pp + r``
            of the model's parts.
        microbatches: number of micro-batches; with several chunks a multiple of ``pp``.
        forward_only: leave out backwards.

    Raises:
        RuntimeError: there is no schedule for these numbers.
    """
    if not (0 <= rank < pp and chunks > 0 and microbatches > 0):
        raise RuntimeError(f"there is no schedule for {rank=}, {pp=}, {chunks=}, {microbatches=}")
    if chunks > 1 and (pp == 1 or microbatches % pp):
        raise RuntimeError(
            f"with {chunks} chunks of the model on each rank the number of micro-batches must be "
            f"a multiple of the number of stages, which must be more than 1; got {microbatches} "
            f"micro-batches and {pp} stages"
        )
    yield from _plans(pp, chunks, microbatches, forward_only)[rank]


def computations(
    rank: int, pp: int, chunks: int, microbatches: int, forward_only: bool
) -> Iterator[Unit]:
    """Forwards and backwards of one rank: forwards alone at first, then in turns."""
    total = chunks * microbatches
    warmup = pp - rank - 1 if chunks == 1 else 2 * (pp - rank - 1) + (chunks - 1) * pp
    warmup = total if forward_only else min(warmup, total)

    def nth(kind: Kind, k: int) -> Action:
        # pp micro-batches pass one chunk, then the next chunk, ...; then come the next pp.
        chunk = k % (pp * chunks) // pp
        microbatch = k // (pp * chunks) * pp + k % pp
        return Action(kind, kind, microbatch, chunk if kind is Kind.FORWARD else chunks - 1 - chunk)

    for k in range(warmup):
        yield (nth(Kind.FORWARD, k),)
    for k in range(warmup, total):
        pair = nth(Kind.FORWARD, k), nth(Kind.BACKWARD, k - warmup)
        # With one chunk the next rank waits for the forward alone.
        yield from [pair] if chunks > 1 else [pair[:1], pair[1:]]
    for k in range(total - warmup, 0 if forward_only else total):
        yield (nth(Kind.BACKWARD, k),)


@functools.lru_cache(maxsize=8)
def _plans(pp: int, chunks: int, microbatches: int, forward_only: bool) -> tuple[Unit, ...]:
    """Every rank's actions, by simulation: a backward takes twice as long as a forward.

    A transfer enters the lists of both ranks at the moment when its value has been computed.
    """
    sizes = pp, chunks, microbatches, forward_only
    ahead = [deque(computations(rank, *sizes)) for rank in range(pp)]
    plans: list[list[Action]] = [[] for _ in range(pp)]
    received: list[set[Action]] = [set() for _ in range(pp)]
    running: list[tuple[int, int, Unit]] = []  # (end, rank, unit), a heap
    now, idle = 0, set(range(pp))
    while idle or running:
        for rank in sorted(idle):
            needs = {_transfer(Kind.RECV, todo, rank, pp, chunks) for todo in ahead[rank][0]}
            if received[rank].issuperset(needs - {None}):
                unit = ahead[rank].popleft()
                plans[rank].extend(unit)
                end = now + sum(1 if todo.kind is Kind.FORWARD else 2 for todo in unit)
                heapq.heappush(running, (end, rank, unit))
                idle.discard(rank)
        now = running[0][0]
        while running and running[0][0] == now:
            _, rank, unit = heapq.heappop(running)
            idle.update({rank} if ahead[rank] else ())
            for done in unit:
                for peer, send, recv in _delivery(done, rank, pp, chunks):
                    plans[rank].append(send)
                    plans[peer].append(recv)
                    received[peer].add(recv)
    return tuple(map(tuple, plans))


def _transfer(kind: Kind, computed: Action, rank: int, pp: int, chunks: int) -> Action | None:
    """The sending of what ``rank`` computes, or the receiving of what it needs for that.

    None at the ends of the model. Outputs go to the next part, gradients to the one before.
    """
    is_ahead = (kind is Kind.SEND) == (computed.what is Kind.FORWARD)
    part = computed.chunk * pp + rank + (1 if is_ahead else -1)
    return computed._replace(kind=kind, peer=part % pp) if 0 <= part < pp * chunks else None


def _delivery(
    done: Action, rank: int, pp: int, chunks: int
) -> Iterator[tuple[int, Action, Action]]:
    """The peer, the sending and the receiving of what ``rank`` has computed, if there are any."""
    send = _transfer(Kind.SEND, done, rank, pp, chunks)
    if send is None or send.peer is None:
        return
    wraps = {Kind.FORWARD: rank == pp - 1, Kind.BACKWARD: -(rank == 0)}[done.what]
    recv = send._replace(kind=Kind.RECV, chunk=send.chunk + wraps, peer=rank)
    yield send.peer, send, recv
