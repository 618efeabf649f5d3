"""Whether the step operator of an optimizer can run, asked when parameters are handed over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .._ops import library

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
