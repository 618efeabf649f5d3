"""Buckets of FusedAdam: of many small tensors the lists stay in C++ from step to step."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._buckets import MASTER, Bucket
from .held import HeldLists, adam_step_held, can_hold, is_eager, is_worth_holding
from .moments import SCALES
from .ops import adam_step, adam_step_capturable

_Lists = tuple[list[Tensor], ...]


class AdamBucket(Bucket):
    """A bucket that hands its lists over once, where that pays."""

    writing_ops = (adam_step_capturable,)  # unscales them

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._may_hold = is_worth_holding(self.params)
        self._kept: _Lists | None = None  # states of the last step, if they may be held
        self._held: HeldLists | None = None  # params and _kept
        self.scales: Tensor | None = None  # [parameters, 2], which the states' share
        if SCALES in self.states[0]:
            self.scales = torch.stack([state[SCALES] for state in self.states])
            for state, scales in zip(self.states, self.scales.unbind(), strict=True):
                state[SCALES] = scales

    @property
    def is_compact(self) -> bool:
        """Whether states or gradients are of dtypes that the plain step does not know."""
        param, state = self.params[0], self.states[0]
        if param.dtype == torch.float64:
            return False
        return (
            any(state[key].dtype != torch.float32 for key in self.layout.moments)
            or (self.has_masters and state[MASTER].dtype != torch.float32)
            or self.grads[0].dtype != param.dtype
        )

    def bind(self, op: Callable[..., None], hyper: tuple) -> Callable[[list[Tensor]], None]:
        states = self._current_states()
        if self._held is None or op is not adam_step or not is_eager(self.grads):
            params, *states = map(self.local, (self.params, *states))
            return lambda grads: op(params, grads, *states, *hyper)
        held = self._held
        return lambda grads: adam_step_held(held.number, grads, *hyper)

    def _current_states(self) -> _Lists:
        """The lists of states; held from the second step with the same tensors on."""
        kept = self._kept
        if kept is None or not self._still_has(kept):
            states = self.state_lists()
            self._kept, self._held = states if self._may_hold else None, None
            return states
        if self._held is None and is_eager(self.grads):
            if can_hold(self.params, kept):
                self._held = HeldLists((self.params, *kept))
            else:
                self._may_hold, self._kept = False, None
        return kept

    def _still_has(self, states: _Lists) -> bool:
        """Whether the state of all parameters still consists of these very tensors."""
        if self.has_masters != bool(states[-1]):
            return False
        return all(
            all(map(operator.is_, map(operator.itemgetter(key), self.states), tensors))
            for key, tensors in zip((*self.layout.moments, MASTER), states, strict=True)
            if tensors
        )
