"""Reads the checkpoint of the loss scalers."""

from __future__ import annotations

import math
from typing import Any


def parsed(state_dict: dict[str, Any]) -> dict[int, tuple[float, int, int | None]]:
    """Index -> (loss_scale, unskipped, overflows_left), or an error that names what is wrong."""
    prefix = "loss_scaler"
    foreign = [
        key
        for key in state_dict
        if not (isinstance(key, str) and key.startswith(prefix) and key[len(prefix) :].isdecimal())
    ]
    if foreign:
        names = ", ".join(map(repr, foreign))
        raise RuntimeError(
            f"amp.load_state_dict: unexpected keys {names}; expected loss_scaler0, loss_scaler1 "
            "and so on. Pass what amp.state_dict() returned."
        )
    entries = {}
    for key, entry in state_dict.items():
        try:
            loss_scale, unskipped = float(entry["loss_scale"]), int(entry["unskipped"])
            left = entry.get("overflows_left")
            left = None if left is None else int(left)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"amp.load_state_dict: {key} must be {{'loss_scale': float, 'unskipped': int}}, "
                f"got {entry!r}."
            ) from error
        if not 0 < loss_scale < math.inf or unskipped < 0 or (left is not None and left < 0):
            raise ValueError(f"amp.load_state_dict: {key} is out of range: {entry!r}.")
        entries[int(key[len(prefix) :])] = loss_scale, unskipped, left
    return entries
