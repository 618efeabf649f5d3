"""Loss scalers for training loops written by hand; amp has its own in ``apex.amp.scaler``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["DynamicLossScaler", "LossScaler", "to_python_float"]


def to_python_float(t: Any) -> float:
    """The number in a tensor or array of one element, or at the start of a sequence."""
    return t.item() if hasattr(t, "item") else t[0]


class LossScaler:
    """A loss scale that does not change.

    Args:
        scale: positive and finite.

    Attributes:
        cur_scale: the scale; may be assigned.

    Raises:
        ValueError: ``scale`` is out of range.
    """

    def __init__(self, scale: float = 1) -> None:
        _check_positive(type(self).__name__, scale=scale)
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """The factor by which losses are multiplied."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a step has to be skipped: never."""
        return False

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return False

    def update_scale(self, overflow: bool) -> None:
        """Adapt the scale to an iteration's outcome: it stays."""

    def scale_gradient(
        self, module: Any, grad_in: Iterable[Tensor | None], grad_out: Any
    ) -> tuple[Tensor | None, ...]:
        """Scale gradients as a backward hook of a module; None stays None."""
        return tuple(None if grad is None else self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward pass of ``loss * loss_scale``."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that shrinks after an overflow, and grows after a while without one.

    Args:
        init_scale: first scale.
        scale_factor: > 1; what the scale is divided or multiplied by. It never falls below 1.
        scale_window: iterations without overflow before the scale grows, and between growths.

    Attributes:
        cur_scale, scale_factor, scale_window: as above; may be assigned.
        cur_iter: number of calls of :meth:`update_scale`.
        last_overflow_iter: ``cur_iter`` of the last overflow; -1 before.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        _check_positive(type(self).__name__, init_scale=init_scale)
        super().__init__(init_scale)
        if not scale_factor > 1:
            raise ValueError(
                f"DynamicLossScaler: scale_factor must be above 1, got {scale_factor}."
            )
        if scale_window < 1:
            raise ValueError(
                f"DynamicLossScaler: scale_window must be at least 1, got {scale_window}."
            )
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether the gradient of one of ``params`` has an inf or NaN."""
        return any(p.grad is not None and self._has_inf_or_nan(p.grad) for p in params)

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        values = x.coalesce().values() if x.is_sparse else x
        return not bool(torch.isfinite(values).all())

    def update_scale(self, overflow: bool) -> None:
        """Divide the scale after an overflow; multiply it ``scale_window`` iterations after one."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1


def _check_positive(name: str, **values: float) -> None:
    for argument, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}: {argument} must be positive and finite, got {value}.")
