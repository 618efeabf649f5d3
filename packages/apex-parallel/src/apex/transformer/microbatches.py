"""How many micro-batches make up a global batch: always the same number, or growing at first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .log_util import get_transformer_logger

__all__ = [
    "ConstantNumMicroBatches",
    "NumMicroBatchesCalculator",
    "RampupBatchsizeNumMicroBatches",
    "build_num_microbatches_calculator",
]

_logger = get_transformer_logger(__name__)


class NumMicroBatchesCalculator(ABC):
    """Knows the number of micro-batches per step; a subclass sets both attributes in ``update``.

    ``num_micro_batches`` counts micro-batches per step and data-parallel rank;
    ``current_global_batch_size`` counts samples per step over all ranks. Both are None at first.
    """

    def __init__(self) -> None:
        self.num_micro_batches: int | None = None
        self.current_global_batch_size: int | None = None

    def get(self) -> int | None:
        """The number of micro-batches per step."""
        return self.num_micro_batches

    def get_current_global_batch_size(self) -> int | None:
        """The number of samples per step, over all ranks."""
        return self.current_global_batch_size

    @abstractmethod
    def update(self, consumed_samples: int, consistency_check: bool) -> None:
        """Adapt to the number of samples that training has consumed so far.

        ``consistency_check`` refuses a batch size that is no multiple of what the ranks take at
        once, and changes nothing then.
        """


class ConstantNumMicroBatches(NumMicroBatchesCalculator):
    """``global_batch_size / (micro_batch_size * data_parallel_size)``, whatever was consumed.

    Raises ``ValueError`` where that is no whole number, or is zero.
    """

    def __init__(
        self, global_batch_size: int, micro_batch_size: int, data_parallel_size: int
    ) -> None:
        super().__init__()
        at_once = _samples_at_once(micro_batch_size, data_parallel_size)
        if global_batch_size < 1 or global_batch_size % at_once:
            raise ValueError(_not_divisible("global_batch_size", global_batch_size, at_once))
        self.num_micro_batches = global_batch_size // at_once
        self.current_global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size

    def update(self, consumed_samples: int, consistency_check: bool) -> None:
        """Change nothing."""


class RampupBatchsizeNumMicroBatches(NumMicroBatchesCalculator):
    """A batch that grows in equal steps over the first samples of training.

    Args:
        start_batch_size: global batch size at the beginning.
        batch_size_increment: what each step adds; divides ``global_batch_size -
            start_batch_size``.
        ramup_samples: after this many consumed samples the batch has its full size. (The spelling
            is Apex's.)
        global_batch_size: full size, at least ``start_batch_size``.
        micro_batch_size: samples per micro-batch.
        data_parallel_size: replicas of the model.

    Raises:
        ValueError: a number is out of range, or the increment does not divide the difference.
    """

    def __init__(
        self,
        start_batch_size: int,
        batch_size_increment: int,
        ramup_samples: int,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
    ) -> None:
        super().__init__()
        at_once = _samples_at_once(micro_batch_size, data_parallel_size)
        difference = global_batch_size - start_batch_size
        for name, value, least in (
            ("start_batch_size", start_batch_size, 1),
            ("batch_size_increment", batch_size_increment, 1),
            ("ramup_samples", ramup_samples, 0),
            ("global_batch_size", global_batch_size, start_batch_size),
        ):
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        if difference % batch_size_increment:
            raise ValueError(
                f"batch_size_increment: expected a divisor of {difference}, the difference of "
                f"global and start batch size; got {batch_size_increment}"
            )
        self.start_batch_size, self.batch_size_increment = start_batch_size, batch_size_increment
        self.ramup_samples, self.global_batch_size = ramup_samples, global_batch_size
        self.micro_batch_size, self.data_parallel_size = micro_batch_size, data_parallel_size
        self.micro_batch_times_data_parallel_size = at_once
        self.update(0, False)

    def update(self, consumed_samples: int, consistency_check: bool) -> None:
        """Set both numbers for the next step, see the base class."""
        size = self.global_batch_size
        if consumed_samples < self.ramup_samples:
            steps = (size - self.start_batch_size) // self.batch_size_increment
            done = consumed_samples * steps // self.ramup_samples
            size = self.start_batch_size + done * self.batch_size_increment
        at_once = self.micro_batch_times_data_parallel_size
        if consistency_check and size % at_once:
            raise ValueError(_not_divisible("the current global batch size", size, at_once))
        self.num_micro_batches = size // at_once
        self.current_global_batch_size = size


def build_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
) -> NumMicroBatchesCalculator:
    """A calculator: constant, or growing if ``rampup_batch_size`` is given.

    Args:
        rank: rank 0 logs what is built.
        rampup_batch_size: None, or start size, increment, samples, as
            :class:`RampupBatchsizeNumMicroBatches` takes them.
        global_batch_size: samples per step over all ranks.
        micro_batch_size: samples per micro-batch.
        data_parallel_size: replicas of the model.

    Raises:
        ValueError: see the two classes; or ``rampup_batch_size`` has not three numbers.
    """
    sizes = global_batch_size, micro_batch_size, data_parallel_size
    if rampup_batch_size is None:
        constant = ConstantNumMicroBatches(*sizes)
        if rank == 0:
            _logger.info("every step has %d micro-batches", constant.get())
        return constant
    if len(rampup_batch_size) != 3:
        raise ValueError(
            "rampup_batch_size: expected [start size, increment, samples], "
            f"got {list(rampup_batch_size)}"
        )
    start, increment, samples = map(int, rampup_batch_size)
    if rank == 0:
        message = "the global batch grows from %d to %d samples by %d, over %d samples"
        _logger.info(message, start, global_batch_size, increment, samples)
    return RampupBatchsizeNumMicroBatches(start, increment, samples, *sizes)


def _samples_at_once(micro_batch_size: int, data_parallel_size: int) -> int:
    if micro_batch_size < 1 or data_parallel_size < 1:
        raise ValueError(
            "micro_batch_size and data_parallel_size: expected at least 1, "
            f"got {micro_batch_size} and {data_parallel_size}"
        )
    return micro_batch_size * data_parallel_size


def _not_divisible(name: str, size: int, at_once: int) -> str:
    return (
        f"{name}: expected a multiple of {at_once}, micro_batch_size x data_parallel_size; "
        f"got {size}"
    )
