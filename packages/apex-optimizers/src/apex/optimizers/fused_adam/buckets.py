"""Buckets of FusedAdam: those with scales, or with states of other dtypes, are special."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from ..fused_adam_compact import adam_step_compact
from ..stepping.buckets import MASTER, Bucket
from ..stepping.checks import SMALL_FLOATS
from ..stepping.step import Step
from .moments import SCALED, SCALES, compact_step, store_scaled
from .ops import adam_step, adam_step_capturable

ADAM = Step(adam_step, __file__, holds=True)
CAPTURABLE = Step(adam_step_capturable, __file__, lr="device_lr", step="device_step")
COMPACT = Step(
    adam_step_compact,
    __file__,
    launch=compact_step,
    before="Tensor? scales, Tensor? clip",
    without=("scales", "new_scales"),
)

_MASTER_SCALE = SCALED.index(MASTER)

_scales_of = operator.methodcaller("get", SCALES)


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

    def choose_step(self, numbers: dict[str, Any]) -> None:
        """Take the compact step where states or gradients are of dtypes that it alone knows.

        Gradients are checked, and made float64, where no step takes them as they are.
        """
        is_narrow = self.dtype == torch.float64 != self.grads[0].dtype
        if not self.layout.any_grad_dtype or is_narrow or numbers["clip"] is not None:
            self.check_new_gradients()  # the compact step would take other dtypes
        if is_narrow:
            if self.pipeline is not None:
                self.pipeline.wait(self)
            self.used = [_clipped(grad, numbers["clip"]).double() for grad in self.used]
            numbers["clip"] = None
        is_small = self.dtype in SMALL_FLOATS
        if self._has_small_states or (is_small and self.grads[0].dtype != self.dtype):
            self.step, numbers["scales"] = COMPACT, self.scales
            numbers["gradient_scale"] = -1.0 if numbers["maximize"] else 1.0


def _clipped(grad: Tensor, clip: Tensor | None) -> Tensor:
    """A gradient times a number, rounded to its own dtype as steps of that dtype do."""
    if clip is None:
        return grad
    wide = torch.promote_types(grad.dtype, torch.float32)
    return (grad.to(wide) * clip.to(wide)).to(grad.dtype)
