"""update_scale_hysteresis."""

from __future__ import annotations

import torch
from torch import Tensor

from .._shared.native.writes import call_counted
from ..update_scale_hysteresis import update_scale_hysteresis as _update


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Update a dynamic loss scale in place and return it.

    See :func:`apex.optimizers.update_scale_hysteresis.update_scale_hysteresis`.
    """
    call_counted(
        _update,
        current_scale,
        growth_tracker,
        hysteresis_tracker,
        found_inf,
        float(growth_factor),
        float(backoff_factor),
        int(growth_interval),
        int(hysteresis),
    )
    return current_scale
