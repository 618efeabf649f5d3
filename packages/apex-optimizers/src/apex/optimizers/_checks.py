"""Checks that several optimizers share; every message names optimizer, argument and value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ._buckets import state_dtype
from ._gradients import describe


def check_lr(optimizer: str, lr: Any) -> None:
    """Raise ValueError unless ``lr`` is >= 0, a number or a tensor of one element.

    A tensor on a GPU is not read: that would wait for the device.
    """
    if lr is None:
        raise ValueError(f"{optimizer}: lr must be given, to the optimizer or to every group.")
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"{optimizer}: lr must have one element, got shape {list(lr.shape)}.")
        if not lr.is_cpu:
            return
        lr = lr.item()
    if not lr >= 0:
        raise ValueError(f"{optimizer}: lr must be >= 0, got {lr}.")


def check_not_negative(optimizer: str, group: dict[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError for the first of these hyper-parameters that is negative or NaN."""
    for name in names:
        if not group[name] >= 0:
            raise ValueError(f"{optimizer}: {name} must be >= 0, got {group[name]}.")


def check_betas(optimizer: str, betas: tuple[float, float]) -> None:
    """Raise ValueError unless both decays are in [0, 1)."""
    for index, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"{optimizer}: betas[{index}] must be in [0, 1), got {beta}.")


def check_params(optimizer: str, params: list[Tensor]) -> None:
    """Raise TypeError for the first parameter whose dtype has no kernel."""
    for index, param in enumerate(params):
        if state_dtype(param) is None:
            raise TypeError(
                f"{optimizer}: params[{index}] must be float64, float32, float16 or bfloat16, got "
                f"{describe(param)}."
            )


def check_duplicates(optimizer: str, params: list[Tensor]) -> None:
    """Raise ValueError if a parameter stands twice in a list: one launch would update it twice."""
    first: dict[int, int] = {}
    for index, param in enumerate(params):
        if first.setdefault(id(param), index) != index:
            raise ValueError(
                f"{optimizer}: params[{index}] is params[{first[id(param)]}]; a parameter can be "
                "in an optimizer only once."
            )
