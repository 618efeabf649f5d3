"""Local response norm of permuted channels: each still has the neighbours that it had."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class OrderedLocalResponseNorm(nn.LocalResponseNorm):
    """Sums over neighbouring channels in the order that the channels had at first.

    Attributes:
        channel_order: int64 ``[C]``, the first place of each channel; None where all are at their
            first place. It is a buffer, so checkpoints have it once channels are permuted.
    """

    channel_order: Tensor | None

    @staticmethod
    def adopt(module: nn.LocalResponseNorm, channel_order: Tensor | None) -> None:
        """Make a plain module, or one of these, one that has this order."""
        module.__class__ = OrderedLocalResponseNorm
        module.register_buffer("channel_order", channel_order)

    @classmethod
    def adopt_all(cls, model: nn.Module) -> None:
        """Let all plain local response norms of a model be able to load an order."""
        for module in model.modules():
            if type(module) is nn.LocalResponseNorm:
                cls.adopt(module, None)

    def forward(self, input: Tensor) -> Tensor:
        """The norm of ``[N, C, *]``."""
        if self.channel_order is None:
            return super().forward(input)
        order = self.channel_order.to(input.device)
        first = input.index_select(1, torch.argsort(order))
        return super().forward(first).index_select(1, order)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        saved = state_dict.get(f"{prefix}channel_order")
        if self.channel_order is None and saved is not None:
            self.channel_order = torch.empty_like(saved)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
