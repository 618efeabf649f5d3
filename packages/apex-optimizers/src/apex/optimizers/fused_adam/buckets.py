"""Buckets of FusedAdam: those with scales, or with states of other dtypes, are special."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._buckets import MASTER
from .._held import HeldOps
from .._held_buckets import HoldingBucket
from .moments import SCALES
from .ops import adam_step, adam_step_capturable

ADAM_HELD = HeldOps(adam_step, __file__)


class AdamBucket(HoldingBucket):
    """A bucket that hands its lists over once, where that pays."""

    writing_ops = (adam_step_capturable,)  # unscales them
    held_ops = ADAM_HELD

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
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
