"""The update_scale_hysteresis operator: schema, documentation and fake kernel."""

from __future__ import annotations

from torch import Tensor

from .._ops import library

__all__ = ["update_scale_hysteresis"]


@library.define(
    "update_scale_hysteresis(Tensor(a!) current_scale, Tensor(b!) growth_tracker, "
    "Tensor(c!) hysteresis_tracker, Tensor found_inf, float growth_factor, float backoff_factor, "
    "int growth_interval, int hysteresis) -> ()"
)
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> None:
    """Update a dynamic loss scale in place, on its device, without waiting for it.

    The ``hysteresis``-th step with inf or NaN since the last clean step, and each further one,
    multiplies the scale by ``backoff_factor``. ``growth_interval`` clean steps multiply it by
    ``growth_factor``, unless float32 would overflow.

    Args:
        current_scale: float32, one element.
        growth_tracker: int32, one element: clean steps since the scale last changed.
        hysteresis_tracker: int32, one element: how many more steps with inf or NaN keep the scale,
            plus one.
        found_inf: float32, one element: > 0 where this step has inf or NaN.
        growth_factor, backoff_factor: factors without unit; ``> 0``.
        growth_interval: steps; ``>= 1``.
        hysteresis: steps; ``>= 0``.

    Raises:
        RuntimeError: a tensor is of another dtype, size or device, or a number is out of range;
            nothing is changed then.

    Source:
        Micikevicius et al., *Mixed Precision Training*, ICLR 2018, section 3.2, with a tolerance.
    """
