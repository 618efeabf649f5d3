"""Gradients on their way: from parameters into the flat buffer, and, reduced, to the own part."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.collectives import Works, join_stream, on_stream, reduce_scatter_single
from .arguments import NAME
from .groups import NodeGroups
from .layout import Layout

__all__ = ["GradientBuffer", "Reductions"]


class GradientBuffer:
    """The flat buffer of a rank's own gradients, and which of them it has.

    Args:
        params: in the layout's order.
        factor: gradients are multiplied by it.
        dtype: of the buffer.
    """

    def __init__(
        self, params: Sequence[Tensor], layout: Layout, factor: float, dtype: torch.dtype
    ) -> None:
        self._params, self._layout, self._factor = params, layout, factor
        self.flat = torch.zeros(layout.total, dtype=dtype, device=params[0].device)
        self._parts = [
            self.flat[offset : offset + numel].view(param.shape)
            for param, offset, numel in zip(params, layout.offsets, layout.numels, strict=True)
        ]
        self._blocks = [layout.blocks_of(i) for i in range(len(params))]
        self._all = Counter(block for blocks in self._blocks for block in blocks)
        self.forget()

    def forget(self) -> None:
        """Let no gradient be here."""
        self._here: set[int] = set()
        self._missing = self._all.copy()

    def add(self, index: int) -> None:
        """Copy the gradient of a parameter, or zeros; again, if it is here already.

        Raises:
            RuntimeError: the gradient is sparse.
        """
        grad, part = self._params[index].grad, self._parts[index]
        if grad is None:
            part.zero_()
        elif grad.is_sparse:
            raise RuntimeError(
                f"{NAME}: a gradient is sparse, which is not supported; use sparse=False in the "
                "embedding."
            )
        else:
            part.copy_(grad)
            if self._factor != 1:
                part.mul_(self._factor)
        if index not in self._here:
            self._here.add(index)
            self._missing.subtract(self._blocks[index])

    def add_missing(self) -> None:
        """Copy all that are not here."""
        for index in range(len(self._params)):
            if index not in self._here:
                self.add(index)

    def clip(self, norm: Tensor, limit: float) -> None:
        """Scale all gradients, whose norm is ``norm``, to ``limit``, before they are reduced."""
        if limit > 0:
            self.flat.mul_((limit / (norm + 1e-6)).clamp(max=1).float())

    def is_complete(self, block: int) -> bool:
        """Whether all gradients of a block are here."""
        return self._missing[block] == 0

    def last_block_of(self, index: int) -> int:
        """The highest block of a parameter; -1 for one without elements."""
        blocks = self._blocks[index]
        return blocks.stop - 1 if blocks else -1

    def hook(self, arrived: Callable[[int], None]) -> list[torch.utils.hooks.RemovableHandle]:
        """Call ``arrived(index)`` whenever a backward pass has completed a gradient.

        Args:
            arrived: a method. Parameters do not keep its object alive.
        """
        method = weakref.WeakMethod(arrived)

        def call(index: int) -> None:
            own = method()
            if own is not None:
                own(index)

        return [
            param.register_post_accumulate_grad_hook(lambda _, index=index: call(index))
            for index, param in enumerate(self._params)
        ]


class Reductions:
    """Sums gradients over all ranks; every rank keeps its own shard of the sums.

    Within a node gradients are reduced and scattered, then the shards are reduced between nodes;
    or, with ``full_ar``, all ranks reduce whole blocks. All ranks start blocks in the same order,
    the last first: that is how backward passes reach them.

    gloo's reduce_scatter is an all_reduce underneath that keeps its caller waiting; there blocks
    are reduced as a whole, and the shard is cut out.

    Args:
        flat: gradients of the layout, of one dtype.
        own: this rank's part, of the same dtype.
        full_ar: see above.
        average: let the collective divide; else the gradients have been divided before.
    """

    def __init__(
        self, layout: Layout, groups: NodeGroups, flat: Tensor, own: Tensor, full_ar: bool,
        average: bool,
    ) -> None:  # fmt: skip
        self._layout, self._groups, self._full_ar = layout, groups, full_ar
        self._flat = flat.view(layout.blocks, layout.chunks, layout.shards, layout.shard)
        self._own = own.view(layout.blocks, layout.chunks, layout.shard)
        self._operation = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        self._scatters = flat.is_cuda and dist.get_backend() != "gloo"
        self.device = flat.device
        streams = max(len(groups.within), len(groups.between), 1) if flat.is_cuda else 0
        self.streams = [torch.cuda.Stream(flat.device) for _ in range(streams)]
        self._works: dict[int, Works] = {}  # of started blocks

    @property
    def next_block(self) -> int:
        """The block that is to be started next; -1 after all of them."""
        return self._layout.blocks - 1 - len(self._works)

    def start(self) -> None:
        """Start to reduce the next block."""
        block = self.next_block
        with on_stream(self, block):
            works = self._within(block)
            if self.streams:  # the stream waits, and not the host
                self._between(block, works)
                works.wait()
        self._works[block] = works

    def finish(self) -> Iterator[Tensor]:
        """Start what is left; yield the own part of each block, as soon as it is complete."""
        while self.next_block >= 0:
            self.start()
        if not self.streams:
            for block, works in self._works.items():
                self._between(block, works)
        for block, works in self._works.items():
            works.wait()
            join_stream(self, block)
            yield self._own[block].view(-1)
        self._works = {}

    def _within(self, block: int) -> Works:
        """Start the first stage."""
        works, whole = Works(), self._flat[block]
        groups = self._groups.between if self._full_ar else self._groups.within
        if not groups:
            return works
        group = groups[block % len(groups)]
        if self._full_ar or not self._scatters:
            works.append(dist.all_reduce(whole, self._operation, group, async_op=True))
            return works
        for chunk, own in zip(whole, self._own[block], strict=True):
            work = reduce_scatter_single(own, chunk.view(-1), self._operation, group, async_op=True)
            works.append(work)
        return works

    def _between(self, block: int, works: Works) -> None:
        """Wait for the first stage; have its result in the own part, and start the second."""
        works.wait()
        if self._full_ar or not self._scatters or not self._groups.within:
            self._own[block].copy_(self._flat[block, :, self._groups.shard])
        groups = self._groups.between
        if groups and not self._full_ar:
            group = groups[block % len(groups)]
            works.append(dist.all_reduce(self._own[block], self._operation, group, async_op=True))
