"""Checks that several optimizers share; every message names optimizer, argument and value."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._ops import library
from .buckets import state_dtype
from .gradients import describe

# Hyper-parameters that are handed to operators as numbers, beside betas, and the least that they
# take. A learning rate may be negative, which ascends.
_LARGEST = sys.float_info.max
_LEAST = (
    ("lr", -_LARGEST),
    ("eps", 0.0),
    ("weight_decay", -_LARGEST),
    ("max_grad_norm", -_LARGEST),
    ("momentum", 0.0),
    ("dampening", -_LARGEST),
    ("trust_coefficient", -_LARGEST),
)
_NO_BETAS = (0.0, 0.0)

# Those that groups must have in the range >= 0, if an optimizer has them.
NOT_NEGATIVE = (
    "momentum",
    "eps",
    "weight_decay",
    "max_grad_norm",
    "trust_coefficient",
    "initial_accumulator_value",
)


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


def check_numbers(optimizer: str, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raise TypeError or ValueError for the first hyper-parameter that is no number.

    Returns:
        Groups with numbers that an operator may refuse. If they are stepped first, nothing has been
        written by then.
    """
    doubtful = []
    for group in groups:
        for name, least in _LEAST:
            if name not in group:
                continue
            value = group[name]
            kind = type(value)
            if not ((kind is float or kind is int) and least <= value <= _LARGEST):
                _check_number(optimizer, name, value)
                if name != "lr" or not isinstance(value, Tensor) or value.is_complex():
                    doubtful.append(group)
        betas = group.get("betas", _NO_BETAS)
        is_pair = type(betas) is tuple and [*map(type, betas)] == [float, float]
        if not (is_pair and 0 <= betas[0] < 1 and 0 <= betas[1] < 1):
            _check_number(optimizer, "betas", betas)
            doubtful.append(group)
    return doubtful


def _check_number(optimizer: str, name: str, value: Any) -> None:
    parts = value if name == "betas" and isinstance(value, (tuple, list)) else [value]
    for part in parts:
        if type(part) is float:
            continue
        is_one = part.numel() == 1 if isinstance(part, Tensor) else isinstance(part, numbers.Real)
        if not is_one:
            raise TypeError(f"{optimizer}.step: {name} of a group must be a number, got {value!r}.")
    if name == "betas" and len(parts) != 2:
        raise ValueError(f"{optimizer}.step: betas of a group must be two numbers, got {value!r}.")


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
                f"{optimizer}: params[{index}] must be float64, float32, float16, bfloat16, "
                f"complex64 or complex128, got {describe(param)}."
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


_found: set[tuple[str, str]] = set()  # folders and device types; asking takes longer than the rest


def require_kernels(optimizer: str, folder: str, params: Sequence[Tensor]) -> None:
    """Raise RuntimeError if the operators in ``folder`` cannot run; nothing is built here.

    Parameters that are on the CPU now may be moved to a GPU before the first step.
    """
    for device_type in {param.device.type for param in params} & {"cpu", "cuda"}:
        if (folder, device_type) not in _found:
            path = Path(__file__).parent.parent / folder
            if not (
                device_type == "cpu"
                and torch.cuda.is_available()
                and library.available(path, "cuda")
            ):
                library.require(path, optimizer, device_type)
        _found.add((folder, device_type))
