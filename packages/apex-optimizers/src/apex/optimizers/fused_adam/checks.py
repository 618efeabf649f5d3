"""Checks of FusedAdam's arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._gradients import describe
from .buckets import state_dtype

_LEGACY_KEYS = frozenset({"grads", "output_params", "scale", "grad_norms", "grad_scaler"})


def check_hyper(group: dict[str, Any]) -> None:
    """Raise ValueError for the first hyper-parameter of a group that is out of range."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"FusedAdam: lr must have one element, got shape {list(lr.shape)}.")
    elif not lr >= 0:
        raise ValueError(f"FusedAdam: lr must be >= 0, got {lr}.")
    for index, beta in enumerate(group["betas"]):
        if not 0 <= beta < 1:
            raise ValueError(f"FusedAdam: betas[{index}] must be in [0, 1), got {beta}.")
    if not group["eps"] >= 0:
        raise ValueError(f"FusedAdam: eps must be >= 0, got {group['eps']}.")
    if not group["weight_decay"] >= 0:
        raise ValueError(f"FusedAdam: weight_decay must be >= 0, got {group['weight_decay']}.")


def check_params(params: list[Tensor]) -> None:
    """Raise TypeError for the first parameter whose dtype has no kernel."""
    for index, param in enumerate(params):
        if state_dtype(param) is None:
            raise TypeError(
                f"FusedAdam: params[{index}] must be float64, float32, float16 or bfloat16, got "
                f"{describe(param)}."
            )


def check_legacy(legacy: dict[str, Any]) -> None:
    """Raise unless all arguments of ``step`` from older optimizers are None."""
    unknown = set(legacy) - _LEGACY_KEYS
    if unknown:
        raise TypeError(f"FusedAdam.step: unexpected arguments {sorted(unknown)}.")
    if legacy.get("grad_scaler") is not None:
        raise RuntimeError(
            "FusedAdam.step: grad_scaler is not taken as an argument; call "
            "grad_scaler.step(optimizer), which hands over scale and overflow flag."
        )
    for name, value in legacy.items():
        if value is not None:
            raise RuntimeError(
                f"FusedAdam.step: {name} was an argument of a deprecated optimizer and must be "
                "None. Set the parameters' .grad, then call step()."
            )
