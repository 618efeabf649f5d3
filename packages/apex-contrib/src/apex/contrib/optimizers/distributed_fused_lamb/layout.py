"""Where parameters lie in one flat buffer, and which parts of it each rank steps.

The buffer is blocks x chunks x shards; a rank's own part ("mega shard") is its shard of every chunk
of every block, blocks first. A block is what one reduction takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ALIGNMENT = 64  # elements; of parameters
UNIT = 256  # elements; shards are multiples of it


class Fragment(NamedTuple):
    """The part of a parameter that lies in one shard."""

    param: int  # index in the layout's order
    flat: int  # where it begins in the flat buffer
    own: int  # where it begins in the rank's own part
    numel: int


class Layout:
    """The plan of the buffer; the same on all ranks by construction.

    Args:
        numels: elements of each parameter, in the order in which they are laid out.
        blocks, chunks, shards: >= 1.
    """

    def __init__(self, numels: Sequence[int], blocks: int, chunks: int, shards: int) -> None:
        self.numels, self.blocks, self.chunks, self.shards = list(numels), blocks, chunks, shards
        self.offsets, end = [], 0
        for numel in self.numels:
            self.offsets.append(end)
            end += -(-numel // ALIGNMENT) * ALIGNMENT
        unit = UNIT * blocks * chunks * shards
        self.total = max(-(-end // unit), 1) * unit
        self.block = self.total // blocks
        self.chunk = self.block // chunks
        self.shard = self.chunk // shards
        self.own = self.total // shards

    def fragments(self, rank: int) -> Iterator[Fragment]:
        """Yield what a rank steps, in the order of its own part."""
        for piece in range(self.blocks * self.chunks):
            begin = piece * self.chunk + rank * self.shard
            end = begin + self.shard
            index = max(bisect_right(self.offsets, begin) - 1, 0)
            while index < len(self.offsets) and self.offsets[index] < end:
                first = max(begin, self.offsets[index])
                last = min(end, self.offsets[index] + self.numels[index])
                if first < last:
                    own = piece * self.shard + first - begin
                    yield Fragment(index, first, own, last - first)
                index += 1

    def blocks_of(self, param: int) -> range:
        """The blocks in which a parameter lies."""
        if self.numels[param] == 0:
            return range(0)
        last = self.offsets[param] + self.numels[param] - 1
        return range(self.offsets[param] // self.block, last // self.block + 1)
