"""Checks of the arguments that only FusedMixedPrecisionLamb has."""

from __future__ import annotations

from typing import Any

import torch


def check_reduced_precision(dtype: torch.dtype | None) -> None:
    """Raise ValueError unless parameters of this dtype can have float32 masters."""
    if dtype not in (None, torch.float16, torch.bfloat16):
        raise ValueError(
            "FusedMixedPrecisionLamb: reduced_precision_dtype must be None, torch.float16 or "
            f"torch.bfloat16, got {dtype}."
        )


def check_step(step: Any) -> None:
    """Raise ValueError unless ``step`` counts steps."""
    if not (float(step).is_integer() and step >= 0):
        raise ValueError(f"FusedMixedPrecisionLamb: step must be an integer >= 0, got {step}.")


def given_grad_scaler(*arguments: Any, **named: Any) -> torch.amp.GradScaler | None:
    """The argument ``grad_scaler`` of ``step``, if it was given.

    Raises:
        TypeError: another argument was given, or this is no GradScaler.
    """
    if len(arguments) + len(named) > 1 or set(named) - {"grad_scaler"}:
        raise TypeError(
            "FusedMixedPrecisionLamb.step: expected at most closure and grad_scaler, got "
            f"{len(arguments)} positional arguments after closure and keywords {sorted(named)}."
        )
    scaler = named.get("grad_scaler", *arguments)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(
            "FusedMixedPrecisionLamb.step: grad_scaler must be a torch.amp.GradScaler, got "
            f"{type(scaler).__name__}."
        )
    return scaler
