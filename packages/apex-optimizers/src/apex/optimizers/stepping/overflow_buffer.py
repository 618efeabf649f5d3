"""The flag that subclasses written for Apex hand to functions of ``amp_C``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HasOverflowBuffer:
    """A base of optimizers, with the attribute ``_dummy_overflow_buf``."""

    param_groups: list[dict[str, Any]]
    _overflow_buffer: Tensor | None = None

    @property
    def _dummy_overflow_buf(self) -> Tensor:
        """int32 [1] on the device of the first parameter, where the functions look for it."""
        device = next((p.device for g in self.param_groups for p in g["params"]), None)
        buffer = self._overflow_buffer
        if buffer is None or device not in (None, buffer.device):
            buffer = self._overflow_buffer = torch.zeros(1, dtype=torch.int32, device=device)
        return buffer

    @_dummy_overflow_buf.setter
    def _dummy_overflow_buf(self, buffer: Tensor) -> None:
        self._overflow_buffer = buffer
