"""Buckets of FusedAdam: those with scales, or with states of other dtypes, are special."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from ..stepping.buckets import MASTER, Bucket
from ..stepping.checks import SMALL_FLOATS
from ..stepping.held_lists import HeldOps
from .moments import SCALED, SCALES, store_scaled
from .ops import adam_step

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
    """A bucket whose states may be of other dtypes than the plain step knows."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scales: Tensor | None = None  # [parameters, 3]; states share its rows
        if SCALES in self.states[0]:
            device = self.params[0].device
            self.scales = torch.stack([state[SCALES].to(device) for state in self.states])
            rows = list(self.scales.unbind())
            for state, row in zip(self.states, rows, strict=True):
                state[SCALES] = row
            self._shared.append((_scales_of, rows))
        kept = (*self.keys, MASTER) if self.has_masters else self.keys
        self._has_small_states = self.dtype in SMALL_FLOATS and any(
            self.states[0][key].dtype != torch.float32 for key in kept
        )
        self.may_be_compact = self._has_small_states or self.layout.any_grad_dtype

    def whole_master(self, index: int, master: Tensor) -> Tensor:
        if master.dtype == torch.float32:
            return master
        return master.float() * self.scales[index, _MASTER_SCALE]

    def set_master(self, index: int, master: Tensor, value: Tensor) -> None:
        if master.dtype == torch.float32:
            master.copy_(value)
        else:
            store_scaled(master, value, self.scales[index, _MASTER_SCALE])

    def is_compact(self) -> bool:
        """Whether states or gradients are of dtypes that the plain step does not know.

        Gradients are checked, and made float64, where no step takes them as they are.
        """
        if not self.layout.any_grad_dtype:
            self.check_new_gradients()  # the compact step would take other dtypes
        elif self.dtype == torch.float64 != self.grads[0].dtype:
            self.check_new_gradients()
            self.used = [grad.double() for grad in self.used]
        is_small = self.dtype in SMALL_FLOATS
        return self._has_small_states or (is_small and self.grads[0].dtype != self.dtype)

    def clip_copies(self, clip: Tensor | None) -> None:
        """Use copies of the gradients times ``clip``: the compact step does not clip by itself."""
        if clip is None:
            return
        self.check_new_gradients()
        if clip.is_cpu:
            self.used = torch._foreach_mul(self.used, clip.item())
        else:
            factor = clip.float()
            self.used = [_multiplied(grad, factor) for grad in self.used]
