"""How tensors travel between a device and the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

_PIECE = 1 << 28  # bytes


class Trip(Protocol):
    """Copies that are under way; an event of a stream is one."""

    def synchronize(self) -> None:
        """Wait, on the host, until they have arrived.

        Raises:
            RuntimeError: they will not.
        """


class Link(Protocol):
    """Two ways that work at the same time; each keeps the order in which it was asked.

    What is asked for counts at once as a change in place, as ``copy_`` on a stream does.
    """

    is_pinned: bool  # whether the host's tensors have to be

    def receive(self, hosts: Sequence[Tensor], devices: Sequence[Tensor]) -> Trip:
        """Copy to the host what the device has when the work that it was given is done."""

    def send(self, hosts: Sequence[Tensor], devices: Sequence[Tensor]) -> Trip:
        """Copy to the device what the host has until the trip ends."""

    def join(self) -> None:
        """Let work that the device is given from now on see what was sent."""


class StreamLink:
    """A stream of an NVIDIA or AMD GPU for each way."""

    is_pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def receive(self, hosts: Sequence[Tensor], devices: Sequence[Tensor]) -> Trip:
        return self._copy(self._down, hosts, devices, devices)

    def send(self, hosts: Sequence[Tensor], devices: Sequence[Tensor]) -> Trip:
        return self._copy(self._up, devices, hosts, devices)

    def _copy(
        self,
        stream: torch.cuda.Stream,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        devices: Sequence[Tensor],
    ) -> Trip:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        for tensor in devices:  # its memory is not to be given away before
            tensor.record_stream(stream)
        return stream.record_event()

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._up)


class HostMemory:
    """Tensors on the host. Pinned ones share pieces: torch rounds each up to a power of two."""

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._piece, self._used = torch.empty(0, dtype=torch.uint8), 0

    def like(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor of the same shape and strides, with a version counter of its own."""
        size = tensor.numel() * dtype.itemsize
        if not self._is_pinned or size > _PIECE:
            # With a device, for torch may have another default.
            whole = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._is_pinned)
            start = 0
        else:
            if self._used + size > self._piece.numel():
                self._piece = torch.empty(_PIECE, dtype=torch.uint8, device="cpu", pin_memory=True)
                self._used = 0
            whole, start = self._piece, self._used
            self._used += math.ceil(size / 64) * 64
        made = torch.empty(0, dtype=dtype, device="cpu")
        place = start // dtype.itemsize
        return made.set_(whole.untyped_storage(), place, tensor.size(), tensor.stride())
