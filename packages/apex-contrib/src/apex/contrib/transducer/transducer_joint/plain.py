"""The joint of transducers in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cells import inside, rows_of_cells


def transducer_joint(
    f: Tensor,
    g: Tensor,
    f_len: Tensor,
    g_len: Tensor,
    keep: Tensor | None,
    batch_offset: Tensor | None,
    packed_batch: int,
    relu: bool,
    scale: float,
) -> Tensor:
    """What the operator of this name returns, from the same arguments."""
    wide = torch.promote_types(f.dtype, torch.float32)
    h = f.to(wide)[:, :, None] + g.to(wide)[:, None]
    if relu:
        h = h.relu()
    is_inside = inside(f.shape[1], g.shape[1], f_len, g_len)
    if batch_offset is None:
        if keep is not None:
            h = torch.where(keep, h * scale, 0)
        return torch.where(is_inside[..., None], h, -1).to(f.dtype)
    rows = rows_of_cells(is_inside, batch_offset - f_len * g_len, g_len, packed_batch)
    packed = h.new_full((packed_batch + 1, h.shape[-1]), -1)
    packed = packed.index_put((rows,), h)[:packed_batch]  # cells outside go to the last row
    if keep is not None:
        is_known = torch.arange(packed_batch, device=f.device) < batch_offset[-1:]
        packed = torch.where(is_known[:, None], torch.where(keep, packed * scale, 0), -1)
    return packed.to(f.dtype)
