"""The numbers that a group of FusedMixedPrecisionLamb keeps."""

from __future__ import annotations

from typing import Any

import torch

from ..stepping.numbers import numbers_device


def own_numbers(group: dict[str, Any]) -> None:
    """Make ``lr`` and ``step`` tensors of this group alone, on its device."""
    device = numbers_device(group)
    lr, step = group["lr"], group["step"]
    group["lr"] = torch.as_tensor(lr, dtype=torch.float32, device=device).clone().reshape(())
    group["step"] = torch.as_tensor(step, dtype=torch.int32, device=device).clone().reshape(1)
