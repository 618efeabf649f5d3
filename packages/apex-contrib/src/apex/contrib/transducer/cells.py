"""Which cells (t, u) the samples of a batch have, and where they are in packed rows."""

from __future__ import annotations

import torch
from torch import Tensor


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
