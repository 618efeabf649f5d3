"""PeerHaloExchanger1d: fills the halo of a padded tensor with the neighbours' edges, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .halos import check_place, exchange, neighbours
from .peer_memory import PeerMemoryPool

__all__ = ["PeerHaloExchanger1d"]


class PeerHaloExchanger1d:
    """Exchanges edges of tensors that have room for those of the neighbours.

    Args:
        ranks: global ranks, from top (or left) to bottom (or right).
        rank_in_group: this rank's place in them.
        peer_pool: as in Apex; edges go by messages of ``torch.distributed``, which need none.
        half_halo: rows on each side, at least 1.

    Raises:
        ValueError: ``rank_in_group`` or ``half_halo`` does not fit.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank_in_group: int,
        peer_pool: PeerMemoryPool | None,
        half_halo: int,
    ) -> None:
        check_place("PeerHaloExchanger1d", ranks, rank_in_group)
        if half_halo < 1:
            raise ValueError(f"PeerHaloExchanger1d: half_halo must be positive, got {half_halo}.")
        self.ranks, self.peer_pool, self.half_halo = list(ranks), peer_pool, half_halo
        self.left_rank, self.right_rank = neighbours(ranks, rank_in_group)

    @torch.no_grad()
    def __call__(
        self,
        y: Tensor,
        H_split: bool = True,
        explicit_nhwc: bool = False,
        numSM: int = 0,
        diagnostics: bool = False,
    ) -> None:
        """Overwrite the first and last ``half_halo`` rows of ``y`` by the neighbours' inner edges.

        They are zeros at the ends of the ranks.

        Args:
            y: ``[N, C, H, W]``, or ``[N, H, W, C]`` with ``explicit_nhwc``, padded already.
            H_split: the ranks divide the height; else the width.
            numSM, diagnostics: of Apex's kernel; not used.

        Raises:
            ValueError: ``y`` has fewer inner rows than the halo.
        """
        dim, halo = (1 if explicit_nhwc else 2) + (0 if H_split else 1), self.half_halo
        inner = y.shape[dim] - 2 * halo
        if inner < halo:
            raise ValueError(
                f"PeerHaloExchanger1d: y {list(y.shape)} must have at least {3 * halo} rows along "
                f"dimension {dim}: {halo} on each side for the neighbours', and as many inside."
            )
        sent = y.narrow(dim, halo, halo), y.narrow(dim, inner, halo)
        came = exchange(self.left_rank, self.right_rank, *(edge.contiguous() for edge in sent))
        y.narrow(dim, 0, halo).copy_(came[0])
        y.narrow(dim, halo + inner, halo).copy_(came[1])
