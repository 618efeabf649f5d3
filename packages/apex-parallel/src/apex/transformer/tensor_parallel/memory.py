"""Memory taken once and handed out in pieces."""

from __future__ import annotations

import torch
from torch import Tensor

from ..placement import current_device

__all__ = ["MemoryBuffer", "RingMemBuffer", "allocate_mem_buff", "get_mem_buff"]

_buffers: dict[str, MemoryBuffer] = {}


def allocate_mem_buff(name: str, numel: int, dtype: torch.dtype, track_usage: bool) -> MemoryBuffer:
    """Make a buffer that :func:`get_mem_buff` finds; ``ValueError`` if the name is taken."""
    if name in _buffers:
        raise ValueError(f"allocate_mem_buff: there is a buffer {name!r} already")
    _buffers[name] = MemoryBuffer(name, numel, dtype, track_usage)
    return _buffers[name]


def get_mem_buff(name: str) -> MemoryBuffer:
    """The buffer of that name; ``KeyError`` if there is none."""
    return _buffers[name]


class MemoryBuffer:
    """One piece of memory, from which tensors are taken one after the other.

    Args:
        name: for messages.
        numel: number of elements.
        dtype: their dtype.
        track_usage: whether to count how much of it is in use when :meth:`get_data` is called.
    """

    def __init__(self, name: str, numel: int, dtype: torch.dtype, track_usage: bool) -> None:
        self.name, self.numel, self.dtype = name, numel, dtype
        self.data = torch.empty(numel, dtype=dtype, device=current_device())
        self.track_usage = track_usage
        self.in_use_value, self.total_value = 0.0, 0.0
        self._start = 0

    def reset(self) -> None:
        """Hand out everything again from the beginning; tensors taken before are overwritten."""
        self._start = 0

    def is_in_use(self) -> bool:
        """Whether anything has been handed out since the last reset."""
        return self._start > 0

    def numel_in_use(self) -> int:
        """Number of elements handed out since the last reset."""
        return self._start

    def add(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` in the buffer's next free elements; no gradient flows through it.

        Raises ``TypeError`` if the dtype is not the buffer's and ``RuntimeError`` if it is full.
        """
        if tensor.dtype != self.dtype:
            raise TypeError(f"{self.name}: expected a {self.dtype} tensor, got {tensor.dtype}")
        end = self._start + tensor.numel()
        if end > self.numel:
            raise RuntimeError(
                f"{self.name}: {tensor.numel()} elements do not fit, {self.numel - self._start} of "
                f"{self.numel} are free; reset() frees all of them"
            )
        copy = self.data[self._start : end].view(tensor.shape)
        self._start = end
        return copy.copy_(tensor.detach())

    def get_data(self) -> Tensor:
        """The part that is in use, flat."""
        if self.track_usage:
            self.in_use_value += self._start
            self.total_value += self.numel
        return self.data[: self._start]

    def print_average_usage(self) -> None:
        """Print, on the first rank, how much of the buffer was in use on average."""
        if not self.track_usage:
            raise RuntimeError(f"{self.name}: was made with track_usage=False")
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            usage = 100 * self.in_use_value / max(self.total_value, 1)
            print(f" > usage of {self.name} memory buffer: {usage:.2f} %", flush=True)


class RingMemBuffer:
    """Several buffers that are used in turn; arguments are those of :class:`MemoryBuffer`."""

    def __init__(
        self, name: str, num_buffers: int, numel: int, dtype: torch.dtype, track_usage: bool
    ) -> None:
        self.num_buffers = num_buffers
        self.buffers = [
            MemoryBuffer(f"{name} {i}", numel, dtype, track_usage) for i in range(num_buffers)
        ]
        self._index = -1

    def get_next_buffer(self) -> MemoryBuffer:
        """The next buffer; ``RuntimeError`` if it is in use still."""
        following = (self._index + 1) % self.num_buffers
        if self.buffers[following].is_in_use():
            raise RuntimeError(f"{self.buffers[following].name} is in use: reset it first")
        self._index = following
        return self.buffers[following]
