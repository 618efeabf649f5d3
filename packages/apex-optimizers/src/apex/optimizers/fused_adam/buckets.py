"""Buckets of FusedAdam: those with scales, or with states of other dtypes, are special."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..stepping.buckets import MASTER, Bucket
from ..stepping.gradients import SMALL_FLOATS
from ..stepping.held_lists import HeldOps
from .moments import SCALED, SCALES, compact_step, store_scaled
from .ops import adam_step, adam_step_capturable

ADAM_HELD = HeldOps(adam_step, __file__)

_MASTER_SCALE = SCALED.index(MASTER)

_scales_of = operator.methodcaller("get", SCALES)


def _multiplied(grad: Tensor, factor: Tensor) -> Tensor:
    """A copy of a gradient times a float32 factor [1], rounded once and without waiting for it.

    The factor gets the gradient's number of dimensions: one without dimensions would be rounded to
    the gradient's 16 bits before the product on a GPU.
    """
    return torch.mul(grad, factor.reshape([1] * grad.dim()), out=torch.empty_like(grad))


class AdamBucket(Bucket):
    """A bucket whose lists C++ keeps from step to step, if that is faster."""

    writing_ops = (adam_step_capturable,)  # unscales them
    held_ops = ADAM_HELD
    clip: Tensor | None = None  # float64 [1], on the bucket's device: gradients times it are used

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scales: Tensor | None = None  # [parameters, 3]
        self._scales: list[Tensor] = []  # parts of it, one in each state
        if SCALES in self.states[0]:
            device = self.params[0].device
            self.scales = torch.stack([state[SCALES].to(device) for state in self.states])
            self._scales = list(self.scales.unbind())
            for state, scales in zip(self.states, self._scales, strict=True):
                state[SCALES] = scales

    def has_own_states(self) -> bool:
        if not super().has_own_states():
            return False
        if self.scales is None:
            return True
        return all(map(operator.is_, map(_scales_of, self.states), self._scales))

    def whole_master(self, index: int, master: Tensor) -> Tensor:
        if master.dtype == torch.float32:
            return master
        return master.float() * self.scales[index, _MASTER_SCALE]

    def set_master(self, index: int, master: Tensor, value: Tensor) -> None:
        if master.dtype == torch.float32:
            master.copy_(value)
        else:
            store_scaled(master, value, self.scales[index, _MASTER_SCALE])

    def run(self, op: Callable[..., None], *hyper: Any) -> None:
        if op is compact_step and not self.layout.any_grad_dtype:
            self.check_new_gradients()  # the operator itself would take other dtypes
        has_any = self.layout.any_grad_dtype
        if has_any and self.params[0].dtype == torch.float64 != self.grads[0].dtype:
            self.check_new_gradients()
            self.used = [grad.double() for grad in self.used]  # smaller decoupled ones
        super().run(op, *hyper)

    def clip_copies(self) -> None:
        """Use clipped copies of the gradients, for steps that do not clip by themselves."""
        if self.clip is None:
            return
        self.check_new_gradients()
        if self.clip.is_cpu:
            self.used = torch._foreach_mul(self.used, self.clip.item())
        else:
            factor = self.clip.float()
            self.used = [_multiplied(grad, factor) for grad in self.used]

    @property
    def is_compact(self) -> bool:
        """Whether states or gradients are of dtypes that the plain step does not know."""
        param, state = self.params[0], self.states[0]
        if param.dtype not in SMALL_FLOATS:
            return False
        return (
            any(state[key].dtype != torch.float32 for key in self.keys)
            or (self.has_masters and state[MASTER].dtype != torch.float32)
            or (self.layout.any_grad_dtype and self.grads[0].dtype != param.dtype)
        )
