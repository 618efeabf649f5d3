"""Where parameters lie in one flat buffer, and which parts of it each rank steps.

The buffer is blocks x chunks x shards; a rank's own part ("mega shard") is its shard of every chunk
of every block, blocks first. A block is what one reduction takes. A chunk is what the planner of
DistributedFusedAdam calls a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ..distributed.planner import BucketShape, plan, round_to_multiple

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
        aligned = (round_to_multiple(numel, ALIGNMENT) for numel in self.numels)
        *self.offsets, end = accumulate(aligned, initial=0)
        unit = UNIT * blocks * chunks * shards
        self.total = max(round_to_multiple(end, unit), unit)
        self.block = self.total // blocks
        self.chunk = self.block // chunks
        self.shard = self.chunk // shards
        self.own = self.total // shards

    def fragments(self, rank: int) -> list[Fragment]:
        """What a rank steps, in the order of its own part."""
        pieces = plan(self.numels, None, BucketShape(ALIGNMENT, self.shard, self.shards), False)
        chunk, begin = pieces.bucket - 1, rank * self.shard
        first = pieces.bucket_start.clamp(min=begin)
        last = (pieces.bucket_start + pieces.numel).clamp(max=begin + self.shard)
        own = chunk * self.shard + first - begin
        columns = (pieces.param, chunk * self.chunk + first, own, last - first)
        rows = zip(*(column[first < last].tolist() for column in columns), strict=True)
        return [Fragment(*row) for row in rows]

    def blocks_of(self, param: int) -> range:
        """The blocks in which a parameter lies."""
        if self.numels[param] == 0:
            return range(0)
        last = self.offsets[param] + self.numels[param] - 1
        return range(self.offsets[param] // self.block, last // self.block + 1)
