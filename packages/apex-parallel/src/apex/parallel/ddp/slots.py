"""Which gradients of the current backward have arrived, and which buckets may leave."""

from __future__ import annotations

from collections.abc import Sequence

from .plan import Plan


class BucketSlots:
    """One slot per parameter, grouped into buckets that leave in a fixed order.

    Every rank must issue the same collectives in the same order, so a bucket that is complete
    too early waits in ``ready_buckets_not_reduced`` for the ones before it.
    """

    def __init__(self, plan: Plan) -> None:
        self.active_i_buckets = plan
        self.bucket_sizes = [len(bucket) for bucket in plan]
        self._place = {
            index: (b, slot) for b, bucket in enumerate(plan) for slot, index in enumerate(bucket)
        }
        self.clear()

    @property
    def num_buckets(self) -> int:
        """Number of buckets."""
        return len(self.bucket_sizes)

    def clear(self) -> None:
        """Empty all slots, for a new backward."""
        # Flags: the gradients themselves would stay in memory until the next backward.
        self.arrived = [[False] * size for size in self.bucket_sizes]
        self.ready_buckets_not_reduced: set[int] = set()
        self.next_bucket = 0
        self._missing = list(self.bucket_sizes)

    def fill(self, index: int, shape: Sequence[int]) -> list[int]:
        """Note that the gradient of parameter ``index``, of ``shape``, has arrived.

        Returns:
            The buckets that may leave now, in order.

        Raises:
            RuntimeError: the slot is taken.
        """
        bucket, slot = self._place[index]
        if self.arrived[bucket][slot]:
            raise RuntimeError(
                f"DistributedDataParallel: parameter {index} (shape {list(shape)}) got its "
                "gradient twice in one backward, for instance because it is used inside and "
                "outside of a reentrant checkpoint. Use delay_allreduce=True for such models."
            )
        self.arrived[bucket][slot] = True
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            self.ready_buckets_not_reduced.add(bucket)
        leaving = []
        while self.next_bucket in self.ready_buckets_not_reduced:
            leaving.append(self._take_next())
        return leaving

    def take_remaining(self) -> list[int]:
        """The buckets that have not left yet, complete or not, in order; all leave."""
        return [self._take_next() for _ in range(self.next_bucket, len(self.bucket_sizes))]

    def _take_next(self) -> int:
        bucket = self.next_bucket
        self.ready_buckets_not_reduced.discard(bucket)
        self.next_bucket += 1
        return bucket
