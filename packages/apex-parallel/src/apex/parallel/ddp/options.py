"""DistributedDataParallel's options, which it shares with its reducer, and where both live."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .reduction import ReductionOptions


@dataclass
class Options:
    """What users may change at any time, and what pickles hold beside the module.

    The arguments of DistributedDataParallel, which says what they mean.
    """

    message_size: int
    delay_allreduce: bool
    prof: bool
    allreduce_trigger_params: list[Tensor] | None
    retain_allreduce_buffers: bool
    allreduce_always_fp32: bool
    num_allreduce_streams: int
    gradient_average: bool
    gradient_predivide_factor: float
    _disable_allreduce: bool = False  # gradients accumulate locally

    def reduction(self) -> ReductionOptions:
        """Those that one flat buffer's reduction needs."""
        return ReductionOptions(
            world_size=dist.get_world_size(),
            average=self.gradient_average,
            predivide_factor=self.gradient_predivide_factor,
            always_fp32=self.allreduce_always_fp32,
        )


class Kept:
    """An attribute of the wrapper that its reducer, or a part of that, keeps.

    Args:
        part: where in the wrapper it is kept.
        writable: users may set it.
    """

    def __init__(self, part: str, *, writable: bool = True) -> None:
        self._part_of, self._writable = attrgetter(part), writable

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        return self if wrapper is None else getattr(self._part_of(wrapper), self._name)

    def __set__(self, wrapper: Any, value: Any) -> None:
        if not self._writable:
            raise AttributeError(f"{type(wrapper).__name__}: {self._name} can only be read.")
        setattr(self._part_of(wrapper), self._name, value)
