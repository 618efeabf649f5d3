"""Which part of a parameter lies where in buckets: arithmetic alone, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

ALIGNMENT_BYTES = 128  # of where a parameter begins in its bucket, and of a shard


def round_to_multiple(number: int, multiple: int, round_up: bool = True) -> int:
    """The next multiple at or above ``number``, or at or below it."""
    return (number + (multiple - 1) * round_up) // multiple * multiple


@dataclass(frozen=True)
class BucketShape:
    """Sizes in elements of every bucket of one dtype."""

    alignment: int
    shard_size: int
    shards: int

    @property
    def bucket_size(self) -> int:
        """Elements of a whole bucket."""
        return self.shard_size * self.shards

    def size_for(self, left: int | None) -> int:
        """Elements of a new bucket, if ``left`` are still to be placed; None is unknown."""
        if left is None:
            return self.bucket_size
        return min(self.bucket_size, round_to_multiple(left, self.alignment * self.shards))


def bucket_shape(bucket_cap_bytes: int, itemsize: int, shards: int) -> BucketShape:
    """The size of buckets that hold about ``bucket_cap_bytes``.

    Args:
        itemsize: bytes per element of the gradients that are sent.
        shards: over how many ranks a bucket is divided.
    """
    alignment = max(ALIGNMENT_BYTES // itemsize, 1)
    shard = round_to_multiple(bucket_cap_bytes // itemsize // shards, alignment, round_up=False)
    return BucketShape(alignment, max(shard, alignment), shards)


@dataclass(frozen=True)
class Piece:
    """Elements ``[param_start, param_end)`` of a parameter, at ``bucket_start`` of a bucket."""

    bucket: int  # 0 for the bucket that was open, 1 for the first new one, and so on
    param_start: int
    param_end: int
    bucket_start: int
    bucket_size: int


def pieces(
    numel: int, opened: tuple[int, int] | None, shape: BucketShape, after: int | None = None
) -> Iterator[Piece]:
    """Cut a parameter into pieces that fill the open bucket and as many new ones as it takes.

    Args:
        numel: elements of the parameter.
        opened: how much of the open bucket is filled, and its size; None if there is none.
        shape: of new buckets.
        after: elements of the parameters that follow, aligned; None if that is unknown. The last
            bucket is then as small as it can be.
    """
    bucket, start = 0, 0
    at, room = (0, 0) if opened is None else opened
    while start < numel:
        at = round_to_multiple(at, shape.alignment)
        size = min(numel - start, room - at)
        if size > 0:
            yield Piece(bucket, start, start + size, at, room)
            start += size
        left = None if after is None else numel - start + after
        bucket, at, room = bucket + 1, 0, shape.size_for(left)
