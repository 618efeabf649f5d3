"""The arguments of FusedAdam.step that older optimizers took."""

from __future__ import annotations

from typing import Any

_LEGACY_KEYS = frozenset({"grads", "output_params", "scale", "grad_norms", "grad_scaler"})


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
