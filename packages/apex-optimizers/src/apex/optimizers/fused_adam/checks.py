"""The arguments of FusedAdam.step: limits of the norm, and what older optimizers took."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

_LEGACY_KEYS = ("grads", "output_params", "scale", "grad_norms", "grad_scaler")  # in this order


def check_legacy(positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Raise unless all arguments of ``step`` from older optimizers are None.

    Args:
        positional: those after ``closure``.
        named: those by keyword.
    """
    given = _LEGACY_KEYS[: len(positional)]
    unknown = (set(named) - set(_LEGACY_KEYS)) | (set(named) & set(given))
    if unknown or len(positional) > len(given):
        raise TypeError(
            f"FusedAdam.step: expected at most closure, {', '.join(_LEGACY_KEYS)}, each once, got "
            f"{len(positional)} positional arguments after closure and keywords {sorted(named)}."
        )
    legacy = {**dict(zip(given, positional, strict=True)), **named}
    if legacy.get("grad_scaler") is not None:
        raise RuntimeError(
            "FusedAdam.step: grad_scaler must be None; call grad_scaler.step(optimizer), which "
            "passes scale and overflow flag to this optimizer."
        )
    for name, value in legacy.items():
        if value is not None:
            raise RuntimeError(
                f"FusedAdam.step: {name} was an argument of a deprecated optimizer and must be "
                "None. Set the parameters' .grad, then call step()."
            )


@dataclasses.dataclass(frozen=True)
class NormLimits:
    """What the norm of all gradients decides of one step."""

    max_norm: float | None = None  # gradients are clipped to it
    skip_nonfinite: bool = False
    skip_above: float | None = None  # steps with a larger norm are skipped

    @classmethod
    def of(cls, max_norm: object, skip_nonfinite: object, skip_above: object) -> NormLimits:
        """From the arguments of ``step``.

        Raises:
            ValueError: a limit is negative, NaN, or no number.
        """
        limits = {"max_norm": max_norm, "skip_above": skip_above}
        for name, limit in limits.items():
            is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
            if limit is not None and not (is_number and limit >= 0):
                raise ValueError(
                    f"FusedAdam.step: {name} must be a number >= 0 in gradient units, or None, "
                    f"got {limit!r}."
                )
        return cls(max_norm, bool(skip_nonfinite), skip_above)

    @property
    def may_skip(self) -> bool:
        return self.skip_nonfinite or self.skip_above is not None

    def clip(self, norm: Tensor) -> Tensor | None:
        """What gradients are multiplied by, as in ``torch.nn.utils.clip_grad_norm_``; float64."""
        if self.max_norm is None:
            return None
        # A number divided by a tensor would be the number times an inverse, rounded twice.
        limit = torch.full_like(norm, self.max_norm, dtype=torch.float64)
        return (limit / (norm.double() + 1e-6)).clamp_(max=1.0)

    def skips(self, norm: Tensor) -> Tensor:
        """1 where the step is to be skipped, else 0; float32, shaped as ``norm``."""
        skips = torch.zeros_like(norm, dtype=torch.bool)
        if self.skip_nonfinite:
            skips = ~norm.isfinite()
        if self.skip_above is not None:
            skips = skips | (norm > self.skip_above)
        return skips.float()
