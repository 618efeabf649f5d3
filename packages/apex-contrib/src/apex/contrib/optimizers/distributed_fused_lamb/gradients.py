"""Gradients on their way from the parameters into the flat buffer."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .arguments import NAME
from .layout import Layout

__all__ = ["GradientBuffer"]


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
