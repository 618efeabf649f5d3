"""The arguments of FusedAdam.step that older optimizers took."""

from __future__ import annotations

from typing import Any

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
