"""The numbers of a step that live on the device: learning rate, step count, scale and flag."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .._sharding import whole_number
from ..fused_lamb.buckets import LambBucket


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What a GradScaler hands over, for one step."""

    inv_scale: Tensor | None  # float32, one element; None: gradients are not scaled
    found_inf: Tensor | None  # float32, one element; not 0: skip the step. None: 0

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Scaling:
        """From the attributes that ``torch.amp.GradScaler.step`` sets."""
        scale = getattr(optimizer, "grad_scale", None)
        found_inf = whole_number(getattr(optimizer, "found_inf", None))
        return cls(
            # Rounded once: a division in float32 is not exact on every device.
            None if scale is None else scale.double().reciprocal().float(),
            None if found_inf is None else found_inf.float(),
        )

    def on(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """``inv_scale`` and ``found_inf`` on a device."""
        return tuple(
            None if number is None else number.to(device)
            for number in (self.inv_scale, self.found_inf)
        )

    def counted(self, device: torch.device) -> Tensor | int:
        """By how much this step advances a count: by 0 where it is skipped."""
        found_inf = self.on(device)[1]
        return 1 if found_inf is None else (found_inf == 0).to(torch.int32)


class MixedPrecisionBucket(LambBucket):
    """A bucket that knows this step's scale and flag."""

    scaling: Scaling


def is_foreign(lr: Any) -> bool:
    """Whether ``group["lr"]`` was assigned something else than a float32 tensor."""
    return not isinstance(lr, Tensor) or lr.dtype != torch.float32


def own_numbers(group: dict[str, Any]) -> None:
    """Make ``lr`` and ``step`` tensors of this group alone, on its device."""
    device = group["params"][0].device if group["params"] else None
    lr, step = group["lr"], group["step"]
    group["lr"] = torch.as_tensor(lr, dtype=torch.float32, device=device).clone().reshape(())
    group["step"] = torch.as_tensor(step, dtype=torch.int32, device=device).clone().reshape(1)
