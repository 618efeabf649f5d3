"""Batch samplers that go on where a training run stopped, by the number of samples it consumed."""

from __future__ import annotations

import abc
from collections.abc import Iterator

import torch

__all__ = ["MegatronPretrainingRandomSampler", "MegatronPretrainingSampler"]


class _Base(abc.ABC):
    """Sizes that both samplers have; the local minibatch may change while they are iterated."""

    _error: type[Exception]  # of sizes out of range

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        local_minibatch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        self._require("total_samples", total_samples, 1)
        self._require("consumed_samples", consumed_samples, 0)
        self._require("data_parallel_rank", data_parallel_rank, 0, data_parallel_size - 1)
        self.total_samples, self.consumed_samples = total_samples, consumed_samples
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size
        self.local_minibatch_size = local_minibatch_size

    def _require(self, name: str, value: int, least: int, most: int | None = None) -> None:
        if value < least or (most is not None and value > most):
            expected = f"at least {least}" if most is None else f"{least} to {most}"
            raise self._error(f"{type(self).__name__}: {name}: expected {expected}, got {value}")

    def __len__(self) -> int:
        """Number of samples, as in Apex, not of batches."""
        return self.total_samples

    @abc.abstractmethod
    def __iter__(self) -> Iterator[list[int]]: ...

    @property
    def local_minibatch_size(self) -> int:
        """Samples of this rank's next batch."""
        return self._local_minibatch_size

    @local_minibatch_size.setter
    def local_minibatch_size(self, new_local_minibatch_size: int) -> None:
        self._require("local_minibatch_size", new_local_minibatch_size, 1)
        self._local_minibatch_size = new_local_minibatch_size

    @property
    def _all_ranks_size(self) -> int:
        return self.local_minibatch_size * self.data_parallel_size


class MegatronPretrainingSampler(_Base):
    """Samples in their order: each batch is divided over the ranks in consecutive parts.

    Args:
        total_samples: size of the data set.
        consumed_samples: samples that all ranks together have used before.
        local_minibatch_size: samples of a rank's batch.
        data_parallel_rank, data_parallel_size: of this rank.
        drop_last: leave out the last batch if it is not full; otherwise its samples go to the first
            ranks, and a rank that gets none has one batch less.

    Raises:
        RuntimeError: there is nothing to sample, or a size or the rank is out of range; also where
            ``local_minibatch_size`` is set later.
    """

    _error = RuntimeError

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        local_minibatch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        sizes = local_minibatch_size, data_parallel_rank, data_parallel_size
        super().__init__(total_samples, consumed_samples, *sizes)
        self._require("consumed_samples", consumed_samples, 0, total_samples - 1)
        self.drop_last = drop_last

    def get_start_end_idx(self) -> tuple[int, int]:
        """This rank's part of a batch of all ranks."""
        start = self.data_parallel_rank * self.local_minibatch_size
        return start, start + self.local_minibatch_size

    def __iter__(self) -> Iterator[list[int]]:
        first = self.consumed_samples
        while first < self.total_samples:
            size = self._all_ranks_size
            if first + size > self.total_samples and self.drop_last:
                return
            start, end = self.get_start_end_idx()
            mine = range(first + start, min(first + end, self.total_samples))
            first += size
            if mine:
                yield list(mine)


class MegatronPretrainingRandomSampler(_Base):
    """Samples in an order drawn for each epoch, every rank from a part of the data set of its own.

    The order is drawn from the number of the epoch, so a run that stopped goes on where it was.
    ``consumed_samples`` counts on while it is iterated. A last batch that is not full is left out.

    Args and attributes are those of :class:`MegatronPretrainingSampler`.

    Raises:
        ValueError: a size or the rank is out of range, or the data set is smaller than a batch.
    """

    _error = ValueError

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        local_minibatch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        sizes = local_minibatch_size, data_parallel_rank, data_parallel_size
        super().__init__(total_samples, consumed_samples, *sizes)
        self._active_samples()

    def _active_samples(self) -> int:
        """Samples of an epoch: as many as make full batches."""
        size = self._all_ranks_size
        if self.total_samples < size:
            raise ValueError(
                f"{type(self).__name__}: {self.total_samples} samples are less than a batch of all "
                f"ranks, {size}"
            )
        self.last_batch_size = self.total_samples % size
        return self.total_samples - self.last_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        active = self._active_samples()
        self.epoch, in_epoch = divmod(self.consumed_samples, active)
        if active - in_epoch < self._all_ranks_size:  # after a change of size
            self.epoch, in_epoch = self.epoch + 1, 0
            self.consumed_samples = self.epoch * active
        bucket = active // self.data_parallel_size  # samples of a rank in an epoch
        offset = in_epoch // self.data_parallel_size
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(bucket, generator=generator).tolist()
        first = self.data_parallel_rank * bucket
        mine = [first + index for index in order[offset:]]
        while len(mine) >= self.local_minibatch_size:
            batch, mine = mine[: self.local_minibatch_size], mine[self.local_minibatch_size :]
            self.consumed_samples += self._all_ranks_size
            yield batch
        # After a change of size some may be left over, and would be offered for ever.
        end = (self.epoch + 1) * self._active_samples()
        self.consumed_samples = max(self.consumed_samples, end)
