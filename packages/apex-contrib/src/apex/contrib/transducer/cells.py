"""Which cells (t, u) the samples of a batch have, and where they are in packed rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

INTEGERS = torch.int32, torch.int64


def inside(frames: int, width: int, f_len: Tensor, u_len: Tensor) -> Tensor:
    """Which cells ``[B, frames, width]`` have ``t < f_len`` and ``u < u_len``."""
    t = torch.arange(frames, device=f_len.device)[None, :, None]
    u = torch.arange(width, device=f_len.device)[None, None, :]
    return (t < f_len[:, None, None]) & (u < u_len[:, None, None])


def rows_of_cells(is_inside: Tensor, start: Tensor, u_len: Tensor, rows: int) -> Tensor:
    """The packed row of each cell ``[B, frames, width]``; ``rows`` for cells outside."""
    _, frames, width = is_inside.shape
    t = torch.arange(frames, device=start.device)[None, :, None]
    u = torch.arange(width, device=start.device)
    own = start[:, None, None] + t * u_len[:, None, None] + u
    return torch.where(is_inside, own, rows)


def check_lengths(name: str, argument: str, tensor: Any, batch: int) -> None:
    """Raise unless a tensor holds an integer for each sample: TypeError or ValueError."""
    check_integers(name, argument, tensor)
    if tensor.shape != (batch,):
        raise ValueError(
            f"{name}: {argument} must have shape [{batch}], a number for each sample, got "
            f"{list(tensor.shape)}."
        )


def are_counts(one: Tensor, other: Tensor) -> bool:
    """Whether :func:`check_lengths` has nothing to say but of sizes, which operators check."""
    return one.dim() == other.dim() == 1 and one.dtype in INTEGERS and other.dtype in INTEGERS


def check_integers(name: str, argument: str, tensor: Any) -> None:
    """Raise TypeError unless a tensor holds lengths, labels or offsets."""
    dtype = tensor.dtype if isinstance(tensor, Tensor) else None
    if dtype not in INTEGERS:
        got = dtype or type(tensor).__name__
        raise TypeError(f"{name}: {argument} must be an int32 or int64 tensor, got {got}.")


def check_devices(name: str, first: str, device: torch.device, **tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors are on the device of the argument ``first``."""
    for argument, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{name}: {argument} is on {tensor.device}, but {first} on {device}; move one."
            )
