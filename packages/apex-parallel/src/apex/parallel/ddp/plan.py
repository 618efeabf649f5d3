"""Which gradients travel together, and which of the current backward have arrived."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

Plan = list[list[int]]  # parameter indices of each bucket, in the order of launch


class BucketPlanner:
    """Records the order of arrival of one backward pass and cuts it into buckets.

    Args:
        numels: number of elements of each parameter, by parameter index.
        kinds: what may share a bucket (the dtype), by parameter index.
        message_size: a bucket closes when it holds at least this many elements.
        triggers: indices that close the bucket of their kind when they arrive; when given (not
            None), ``message_size`` is not looked at.
    """

    def __init__(
        self,
        numels: Sequence[int],
        kinds: Sequence[Hashable],
        message_size: int,
        triggers: Collection[int] | None = None,
    ) -> None:
        self._numels, self._kinds = numels, kinds
        self._message_size, self._triggers = message_size, triggers
        self._open: dict[Hashable, list[int]] = {}
        self._closed: Plan = []
        self._arrived: set[int] = set()

    def add(self, index: int) -> None:
        """Note that the gradient of parameter ``index`` has arrived (again: no change)."""
        if index in self._arrived:
            return
        self._arrived.add(index)
        bucket = self._open.setdefault(self._kinds[index], [])
        bucket.append(index)
        if self._is_full(bucket):
            self._closed.append(self._open.pop(self._kinds[index]))

    def _is_full(self, bucket: list[int]) -> bool:
        if self._triggers is not None:
            return bucket[-1] in self._triggers
        return sum(self._numels[index] for index in bucket) >= self._message_size

    def _close_all(self) -> None:
        self._closed.extend(self._open.values())
        self._open.clear()

    def plan(self) -> Plan:
        """All parameters in buckets; those that never arrived come last, in buckets of their own.

        They are kept apart, because a bucket that waits for an unused parameter leaves only at the
        very end.
        """
        self._close_all()
        for index in range(len(self._numels)):
            self.add(index)
        self._close_all()
        return list(self._closed)


def encode(plan: Plan, parameter_count: int) -> list[int]:
    """``[num_buckets, sizes..., indices...]``, padded with -1 to ``1 + 2 * parameter_count``."""
    numbers = [len(plan), *(len(bucket) for bucket in plan)]
    numbers += [index for bucket in plan for index in bucket]
    return numbers + [-1] * (1 + 2 * parameter_count - len(numbers))


def decode(numbers: Sequence[int], parameter_count: int) -> Plan:
    """The inverse of :func:`encode`.

    Raises:
        RuntimeError: the numbers do not name every parameter exactly once.
    """
    bucket_count = numbers[0]
    sizes = numbers[1 : 1 + bucket_count]
    plan, start = [], 1 + bucket_count
    for size in sizes:
        plan.append(list(numbers[start : start + size]))
        start += size
    named = sorted(index for bucket in plan for index in bucket)
    if named != list(range(parameter_count)):
        raise RuntimeError(
            f"DistributedDataParallel: rank 0 sent a bucket structure of {len(named)} parameters, "
            f"but {parameter_count} require gradients here. Every rank must hold the same model."
        )
    return plan


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
