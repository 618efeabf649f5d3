"""New parameters on their way from the ranks that stepped them to every rank's model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._shared.native.writes import call_counted
from ..distributed.collectives import Works, all_gather_single
from ..given_lists import Batches
from ..legacy_adam import cast_unless
from .groups import NodeGroups
from .layout import Layout

__all__ = ["ParameterBuffer"]


class ParameterBuffer:
    """All parameters in the layout, in the form in which they are gathered.

    Args:
        dtype: of the buffer; uint8 stands for the upper bytes of float16 numbers.
        are_views: let the parameters' data be parts of the buffer.
    """

    def __init__(
        self, params: Sequence[Tensor], layout: Layout, groups: NodeGroups, dtype: torch.dtype,
        are_views: bool,
    ) -> None:  # fmt: skip
        self._params, self._layout, self._groups = params, layout, groups
        self._are_views = are_views
        device = params[0].device
        self.flat = torch.zeros(layout.total, dtype=dtype, device=device)
        self._parts = [
            self.flat[offset : offset + numel]
            for offset, numel in zip(layout.offsets, layout.numels, strict=True)
        ]
        self._never = torch.zeros(1, dtype=torch.int32, device=device)
        if dtype == torch.uint8:
            return
        for param, part in zip(params, self._parts, strict=True):
            part.view(param.shape).copy_(param)
            if are_views:
                param.data = part.view(param.shape)

    def gather(self) -> None:
        """Collect the own parts of the other ranks of the node, in place."""
        groups, layout = self._groups.gathering, self._layout
        works = Works()
        pieces = self.flat.view(torch.uint8).chunk(layout.blocks * layout.chunks)
        for piece, chunk in enumerate(pieces):
            if groups:
                own = chunk.chunk(layout.shards)[self._groups.shard]
                group = groups[piece % len(groups)]
                works.append(all_gather_single(chunk, own, group, async_op=True))
        works.wait()

    def write(self, found_inf: Tensor | None = None) -> None:
        """Write the buffer to the parameters, unless ``found_inf``, one number, is not 0."""
        if self._are_views:
            return
        flag = self._never if found_inf is None else (found_inf != 0).int()
        batches = Batches()
        for param, part in zip(self._params, self._parts, strict=True):
            if param.numel() and param.is_contiguous():
                batches.add((), part, param.detach().view(-1))
            elif param.numel():  # channels last, say
                wide = torch.empty_like(part, dtype=torch.float32)
                call_counted(cast_unless, [part], [wide], self._never)
                new = torch.where(flag == 0, wide.view(param.shape), param.float())
                param.copy_(new)
        for _, (parts, params) in batches:
            call_counted(cast_unless, parts, params, flag)
