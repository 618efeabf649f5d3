"""How neighbouring ranks of a divided image exchange the rows at their edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ..peer_memory.halos import check_place, edges, exchange, neighbours
from ..peer_memory.peer_memory import PeerMemoryPool

__all__ = [
    "HaloExchanger",
    "HaloExchangerAllGather",
    "HaloExchangerNoComm",
    "HaloExchangerPeer",
    "HaloExchangerSendRecv",
    "HaloPadder",
    "pad",
]

_Pair = tuple[Tensor, Tensor]


class HaloExchanger:
    """What exchangers share: who the neighbours are.

    Args:
        ranks: global ranks, from left (or top) to right (or bottom).
        rank_in_group: this rank's place in them.

    Attributes:
        left_rank, right_rank: global ranks of the neighbours, -1 at the ends.
        left_zero, right_zero: whether there is none, so that zeros come from there.
        wrap_around_left_rank_in_group, wrap_around_right_rank_in_group: the neighbours' places if
            the ranks were a ring.

    Raises:
        ValueError: ``rank_in_group`` is no place in ``ranks``.
    """

    def __init__(self, ranks: Sequence[int], rank_in_group: int) -> None:
        check_place(type(self).__name__, ranks, rank_in_group)
        self.ranks, self.rank_in_group = list(ranks), rank_in_group
        self.group_size = size = len(self.ranks)
        self.left_rank, self.right_rank = neighbours(self.ranks, rank_in_group)
        self.left_zero, self.right_zero = self.left_rank < 0, self.right_rank < 0
        self.wrap_around_left_rank_in_group = (rank_in_group + size - 1) % size
        self.wrap_around_right_rank_in_group = (rank_in_group + 1) % size

    def left_right_halo_exchange(
        self,
        left_output_halo: Tensor,
        right_output_halo: Tensor,
        left_input_halo: Tensor | None = None,
        right_input_halo: Tensor | None = None,
    ) -> _Pair | None:
        """Send an edge to each neighbour, and get theirs; zeros at the ends.

        Args:
            left_output_halo, right_output_halo: go to the left and the right; of the same shape
                and dtype on all ranks.
            left_input_halo, right_input_halo: filled, if they are given.

        Returns:
            What came from the left and the right; None if it was filled in.
        """
        came = self._exchange(left_output_halo, right_output_halo)
        if left_input_halo is None or right_input_halo is None:
            return came
        left_input_halo.copy_(came[0])
        right_input_halo.copy_(came[1])
        return None

    def _exchange(self, to_left: Tensor, to_right: Tensor) -> _Pair:
        raise NotImplementedError(f"{type(self).__name__} is a base class; use another.")


class HaloExchangerNoComm(HaloExchanger):
    """Swaps a rank's own edges, without communication: for timing alone, the values are wrong."""

    def _exchange(self, to_left: Tensor, to_right: Tensor) -> _Pair:
        return to_right.clone(), to_left.clone()


class HaloExchangerAllGather(HaloExchanger):
    """Gathers the edges of all ranks of a process group; see :class:`HaloExchanger`.

    Args:
        ranks, rank_in_group: see :class:`HaloExchanger`.
        comm: process group of these ranks, in their order; None for the world.
    """

    def __init__(
        self, ranks: Sequence[int], rank_in_group: int, comm: dist.ProcessGroup | None
    ) -> None:
        super().__init__(ranks, rank_in_group)
        self.comm = comm

    def _exchange(self, to_left: Tensor, to_right: Tensor) -> _Pair:
        mine = torch.stack([to_left, to_right])
        everybody = [torch.empty_like(mine) for _ in self.ranks]
        dist.all_gather(everybody, mine, group=self.comm)
        place, none = self.rank_in_group, torch.zeros_like(to_left)
        from_left = none if self.left_zero else everybody[place - 1][1]
        from_right = none if self.right_zero else everybody[place + 1][0]
        return from_left, from_right


class HaloExchangerSendRecv(HaloExchanger):
    """Sends edges to the neighbours alone; see :class:`HaloExchanger`.

    Messages go through the world's process group: gloo's on CPUs, NCCL's or RCCL's on GPUs.
    """

    def _exchange(self, to_left: Tensor, to_right: Tensor) -> _Pair:
        return exchange(self.left_rank, self.right_rank, to_left, to_right)


class HaloExchangerPeer(HaloExchangerSendRecv):
    """As :class:`HaloExchangerSendRecv`, with the arguments of Apex's exchange by peer memory.

    Args:
        ranks, rank_in_group: see :class:`HaloExchanger`.
        peer_pool: as in Apex; messages need none.
        explicit_nhwc, numSM: how Apex's kernel copies; not used.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank_in_group: int,
        peer_pool: PeerMemoryPool | None,
        explicit_nhwc: bool,
        numSM: int = 0,
    ) -> None:
        super().__init__(ranks, rank_in_group)
        self.peer_pool, self.explicit_nhwc, self.numSM = peer_pool, explicit_nhwc, numSM


class _Pad(Function):
    """Put the neighbours' edges around ``x``; the backward gives them back, and adds what comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchanger: HaloExchanger, dim: int, half_halo: int) -> Tensor:
        ctx.exchanger, ctx.dim, ctx.half_halo = exchanger, dim, half_halo
        mine = edges("HaloPadder", x, dim, half_halo)
        came = exchanger.left_right_halo_exchange(*mine)
        return torch.cat([came[0], x, came[1]], dim)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dim, halo = ctx.dim, ctx.half_halo
        if torch.is_grad_enabled():  # create_graph=True: differentiable again
            return _Fold.apply(dy, ctx.exchanger, dim, halo), None, None, None
        return _fold(dy, ctx.exchanger, dim, halo), None, None, None


class _Fold(Function):
    """The gradient of :class:`_Pad`, and the other way round."""

    @staticmethod
    def forward(ctx: Any, dy: Tensor, exchanger: HaloExchanger, dim: int, half_halo: int) -> Tensor:
        ctx.exchanger, ctx.dim, ctx.half_halo = exchanger, dim, half_halo
        return _fold(dy, exchanger, dim, half_halo)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        return _Pad.apply(dx, ctx.exchanger, ctx.dim, ctx.half_halo), None, None, None


def _fold(dy: Tensor, exchanger: HaloExchanger, dim: int, half_halo: int) -> Tensor:
    size = dy.shape[dim] - 2 * half_halo
    came = exchanger.left_right_halo_exchange(*edges("HaloPadder", dy, dim, half_halo))
    dx = dy.narrow(dim, half_halo, size).clone()
    dx.narrow(dim, 0, half_halo).add_(came[0])
    dx.narrow(dim, size - half_halo, half_halo).add_(came[1])
    return dx


def pad(x: Tensor, exchanger: HaloExchanger, dim: int, half_halo: int) -> Tensor:
    """``x`` between ``half_halo`` rows of both neighbours along ``dim``; it may be differentiated.

    All ranks must call it, and take the gradient, in the same order.
    """
    return _Pad.apply(x, exchanger, dim, half_halo)


class HaloPadder:
    """Puts the neighbours' edges around a tensor.

    Args:
        halo_ex: how edges are exchanged.
    """

    def __init__(self, halo_ex: HaloExchanger) -> None:
        self.halo_ex = halo_ex

    def __call__(self, y: Tensor, half_halo: int, explicit_nhwc: bool, H_split: bool) -> Tensor:
        """``y`` with ``half_halo`` rows more on each side; zeros at the ends of the ranks.

        Args:
            y: ``[N, C, H, W]``, or ``[N, H, W, C]`` with ``explicit_nhwc``; gradients pass.
            half_halo: rows on each side, at most as many as ``y`` has.
            H_split: the ranks divide the height; else the width.

        Raises:
            ValueError: ``half_halo`` does not fit.
        """
        dim = (1 if explicit_nhwc else 2) + (0 if H_split else 1)
        return pad(y, self.halo_ex, dim, half_halo)

    def wait(self) -> None:
        """Do nothing: what :meth:`__call__` returns is complete."""
