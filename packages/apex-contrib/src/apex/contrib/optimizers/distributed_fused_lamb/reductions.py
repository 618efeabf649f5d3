"""Reductions of gradients, block by block, while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.collectives import reduce_scatter_single
from .groups import NodeGroups
from .layout import Layout

__all__ = ["Reductions"]


class Reductions:
    """Sums gradients over all ranks; every rank keeps its own shard of the sums.

    Within a node gradients are reduced and scattered, then the shards are reduced between nodes;
    or, with ``full_ar``, all ranks reduce whole blocks. All ranks start blocks in the same order,
    the last first: that is how backward passes reach them.

    gloo's reduce_scatter is an all_reduce underneath that keeps its caller waiting; there blocks
    are reduced as a whole, and the shard is cut out.

    Args:
        flat: gradients of the layout, of one dtype.
        own: this rank's part, of the same dtype.
        full_ar: see above.
        average: let the collective divide; else the gradients have been divided before.
    """

    def __init__(
        self, layout: Layout, groups: NodeGroups, flat: Tensor, own: Tensor, full_ar: bool,
        average: bool,
    ) -> None:  # fmt: skip
        self._layout, self._groups, self._full_ar = layout, groups, full_ar
        self._flat = flat.view(layout.blocks, layout.chunks, layout.shards, layout.shard)
        self._own = own.view(layout.blocks, layout.chunks, layout.shard)
        self._operation = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        self._scatters = flat.is_cuda and dist.get_backend() != "gloo"
        streams = max(len(groups.within), len(groups.between), 1) if flat.is_cuda else 0
        self._streams = [torch.cuda.Stream(flat.device) for _ in range(streams)]
        self._works: dict[int, dist.Work | None] = {}  # of started blocks

    @property
    def next_block(self) -> int:
        """The block that is to be started next; -1 after all of them."""
        return self._layout.blocks - 1 - len(self._works)

    def start(self) -> None:
        """Start to reduce the next block."""
        block = self.next_block
        with self._beside(block):
            work = self._within(block)
            if self._streams:  # the stream waits, and not the host
                self._cut(block, work)
                self._wait(self._between(block))
                work = None
        self._works[block] = work

    def finish(self) -> Iterator[Tensor]:
        """Start what is left; yield the own part of each block, as soon as it is complete."""
        while self.next_block >= 0:
            self.start()
        seconds = {}
        for block, work in self._works.items():
            if not self._streams:
                self._cut(block, work)
                seconds[block] = self._between(block)
        for block in self._works:
            self._wait(seconds.get(block))
            if self._streams:
                torch.cuda.current_stream().wait_stream(self._stream_of(block))
            yield self._own[block].view(-1)
        self._works = {}

    def _within(self, block: int) -> dist.Work | None:
        """Start the first stage."""
        groups = self._groups.between if self._full_ar else self._groups.within
        if not groups:
            return None
        group, whole = groups[block % len(groups)], self._flat[block]
        if self._full_ar or not self._scatters:
            return dist.all_reduce(whole, self._operation, group, async_op=True)
        for chunk, own in zip(whole, self._own[block], strict=True):
            work = reduce_scatter_single(own, chunk.view(-1), self._operation, group, async_op=True)
        return work  # the last of one stream

    def _cut(self, block: int, work: dist.Work | None) -> None:
        """Wait for the first stage; have its result in the own part."""
        self._wait(work)
        if self._full_ar or not self._scatters or not self._groups.within:
            self._own[block].copy_(self._flat[block, :, self._groups.shard])

    def _between(self, block: int) -> dist.Work | None:
        """Start the second stage."""
        groups = self._groups.between
        if self._full_ar or not groups:
            return None
        group = groups[block % len(groups)]
        return dist.all_reduce(self._own[block], self._operation, group, async_op=True)

    @staticmethod
    def _wait(work: dist.Work | None) -> None:
        if work is not None:
            work.wait()

    def _stream_of(self, block: int) -> torch.cuda.Stream:
        return self._streams[block % len(self._streams)]

    def _beside(self, block: int):
        """On a stream of its own, after what the current one has been told."""
        if not self._streams:
            return nullcontext()
        return _on(self._stream_of(block))


@contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
