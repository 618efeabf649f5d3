"""Buckets of many small tensors, whose lists stay in C++ from step to step."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from .buckets import MASTER, Bucket
from .held_lists import HeldOps, Holder

_Lists = tuple[list[Tensor], ...]


class HoldingBucket(Bucket):
    """A bucket whose lists C++ keeps from step to step, if that is faster."""

    held_ops: ClassVar[HeldOps]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._holder = Holder(self.held_ops, self.params)
        self._kept: _Lists | None = None  # states of the last step, if they may be held

    def bind(self, op: Callable[..., None], hyper: tuple) -> Callable[[list[Tensor]], None]:
        if self._kept is None or not self._still_has(self._kept):
            states = self.state_lists()
            self._kept = states if self._holder.may_hold else None
        else:
            states = self._kept
        holder = self._holder
        if op is self.held_ops.plain and holder.lists_of(self.params, states, self.grads):
            return lambda grads: holder.step(grads, *hyper)
        params, *states = map(self.local, (self.params, *states))
        return lambda grads: op(params, grads, *states, *hyper)

    def _still_has(self, states: _Lists) -> bool:
        """Whether the state of all parameters still consists of these very tensors."""
        keys = self.layout.moments
        if self.layout.has_masters:
            keys = (*keys, MASTER)
            if self.has_masters != bool(states[-1]):
                return False
        return all(
            all(map(operator.is_, map(operator.itemgetter(key), self.states), tensors))
            for key, tensors in zip(keys, states, strict=True)
            if tensors
        )
