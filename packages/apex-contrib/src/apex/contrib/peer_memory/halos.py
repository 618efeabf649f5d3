"""Edges that neighbouring ranks exchange, by point-to-point messages of torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["check_place", "edges", "exchange", "neighbours"]


def check_place(name: str, ranks: Sequence[int], rank_in_group: int) -> None:
    """Raise ValueError unless ``rank_in_group`` is a place in ``ranks``."""
    if not 0 <= rank_in_group < len(ranks):
        raise ValueError(
            f"{name}: rank_in_group must be in [0, {len(ranks)}), a place in ranks "
            f"{list(ranks)}; got {rank_in_group}."
        )


def neighbours(ranks: Sequence[int], rank_in_group: int) -> tuple[int, int]:
    """The ranks to the left and to the right; -1 where there is none."""
    left = ranks[rank_in_group - 1] if rank_in_group > 0 else -1
    right = ranks[rank_in_group + 1] if rank_in_group + 1 < len(ranks) else -1
    return left, right


def edges(name: str, x: Tensor, dim: int, half_halo: int) -> tuple[Tensor, Tensor]:
    """The first and last ``half_halo`` rows along ``dim``, contiguous.

    Raises:
        ValueError: there are fewer rows.
    """
    size = x.shape[dim]
    if not 1 <= half_halo <= size:
        raise ValueError(
            f"{name}: the halo must have between 1 and {size} rows, which this rank has of "
            f"{list(x.shape)} along dimension {dim}; got {half_halo}."
        )
    ends = x.narrow(dim, 0, half_halo), x.narrow(dim, size - half_halo, half_halo)
    return ends[0].contiguous(), ends[1].contiguous()


def exchange(
    left: int, right: int, to_left: Tensor, to_right: Tensor, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Send one tensor to each neighbour, and return what they sent.

    Args:
        left, right: global ranks of the neighbours; -1 for none, from which zeros come.
        to_left, to_right: of the same shape and dtype on all ranks.
        group: that both ranks are in; None is the world.
    """
    from_left, from_right = torch.zeros_like(to_left), torch.zeros_like(to_right)
    messages = []
    for peer, sent, received in ((left, to_left, from_left), (right, to_right, from_right)):
        if peer >= 0:
            messages.append(dist.P2POp(dist.isend, sent.contiguous(), peer, group))
            messages.append(dist.P2POp(dist.irecv, received, peer, group))
    if messages:
        for request in dist.batch_isend_irecv(messages):
            request.wait()
    return from_left, from_right
