"""Which gradients travel together, and which of the current backward have arrived."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

import torch

DEFAULT_MESSAGE_SIZE = 10_000_000  # elements, as Apex documents it
Plan = list[list[int]]  # parameter indices of each bucket, in the order of launch


class BucketPlanner:
    """Records the order of arrival of one backward pass and cuts it into buckets.

    Args:
        sizes: the size of each parameter, by parameter index, in the unit of ``limits``.
        kinds: what may share a bucket (the dtype), by parameter index.
        limits: a bucket closes when it holds at least this much. The first limit is for the first
            bucket of each kind, the last one for all that are left.
        triggers: indices that close the bucket of their kind when they arrive; when given (not
            None), ``limits`` are not looked at.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        kinds: Sequence[Hashable],
        limits: Sequence[int],
        triggers: Collection[int] | None = None,
    ) -> None:
        self._sizes, self._kinds = sizes, kinds
        self._limits, self._triggers = limits, triggers
        self._open: dict[Hashable, list[int]] = {}
        self._fill: dict[Hashable, int] = {}  # what the open bucket of a kind holds
        self._count: dict[Hashable, int] = {}  # closed buckets of a kind
        self._closed: Plan = []
        self._arrived: set[int] = set()

    def add(self, index: int) -> None:
        """Note that the gradient of parameter ``index`` has arrived (again: no change)."""
        if index in self._arrived:
            return
        self._arrived.add(index)
        kind = self._kinds[index]
        self._open.setdefault(kind, []).append(index)
        self._fill[kind] = self._fill.get(kind, 0) + self._sizes[index]
        if self._is_full(index, kind):
            self._closed.append(self._open.pop(kind))
            self._fill[kind] = 0
            self._count[kind] = self._count.get(kind, 0) + 1

    def _is_full(self, last: int, kind: Hashable) -> bool:
        if self._triggers is not None:
            return last in self._triggers
        position = min(self._count.get(kind, 0), len(self._limits) - 1)
        return self._fill[kind] >= self._limits[position]

    def _close_all(self) -> None:
        self._closed.extend(self._open.values())
        self._open.clear()
        self._fill.clear()

    def plan(self) -> Plan:
        """All parameters in buckets; those that never arrived come last, in buckets of their own.

        They are kept apart, because a bucket that waits for an unused parameter leaves only at the
        very end.
        """
        self._close_all()
        for index in range(len(self._sizes)):
            self.add(index)
        self._close_all()
        return list(self._closed)


def sizes_and_limits(
    numels: Sequence[int], dtypes: Sequence[torch.dtype], message_size: int
) -> tuple[list[int], list[int]]:
    """What a :class:`BucketPlanner` counts: elements, or bytes at the default ``message_size``.

    The default stands for torch's buckets. They are small enough for several of them, and the first
    one, which leaves early, is smaller still.
    """
    if message_size != DEFAULT_MESSAGE_SIZE:
        return list(numels), [message_size]
    pairs = zip(numels, dtypes, strict=True)
    return [numel * dtype.itemsize for numel, dtype in pairs], [1 << 20, 25 << 20]


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

    Parameters are known by keys of the caller's. ``waiting`` and ``missing`` stay the same objects,
    so that hooks may hold them.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, int] = {}  # key of a parameter that has not arrived -> its bucket
        self.missing: list[int] = []  # by bucket, how many have not arrived
        self.forget()

    def forget(self) -> None:
        """Have no buckets, as before the first plan."""
        self.set_plan([], [])
        self.agreed = False

    def set_plan(self, plan: Plan, keys: Sequence[int]) -> None:
        """Take ``plan``, in which parameter ``index`` has the key ``keys[index]``."""
        self.active_i_buckets = plan
        self.bucket_sizes = [len(bucket) for bucket in plan]
        self._places = {keys[index]: b for b, bucket in enumerate(plan) for index in bucket}
        self.agreed = True
        self.clear()

    @property
    def num_buckets(self) -> int:
        """Number of buckets."""
        return len(self.bucket_sizes)

    def clear(self) -> None:
        """Empty all slots; :meth:`open` makes them wait for a backward's gradients."""
        self.waiting.clear()
        self.missing[:] = self.bucket_sizes
        self.ready_buckets_not_reduced: set[int] = set()
        self.next_bucket = 0
        self.is_open = False

    def open(self) -> None:
        """Wait for all gradients."""
        self.waiting.update(self._places)
        self.is_open = True

    def has_arrived(self, key: int) -> bool:
        """Whether the running, or last, backward has brought the gradient of parameter ``key``."""
        return self.is_open and key not in self.waiting

    def fill(self, key: int, index: int, shape: Sequence[int]) -> list[int]:
        """Note that the gradient of parameter ``key`` (``index``, of ``shape``) has arrived.

        Returns:
            The buckets that may leave now, in order.

        Raises:
            RuntimeError: the slot is taken.
        """
        bucket = self.waiting.pop(key, None)
        if bucket is None:
            raise RuntimeError(
                f"DistributedDataParallel: parameter {index} (shape {list(shape)}) got its "
                "gradient twice in one backward, for instance because it is used inside and "
                "outside of a reentrant checkpoint. Use delay_allreduce=True for such models."
            )
        self.missing[bucket] -= 1
        return self.complete(bucket) if self.missing[bucket] == 0 else []

    def complete(self, bucket: int) -> list[int]:
        """Note that ``bucket`` is complete; returns the buckets that may leave now, in order."""
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
