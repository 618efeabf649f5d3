"""Lanes: what carries collectives (a process group and, on accelerators, a side stream)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Lane:
    """One process group, and one stream on accelerators (None on the CPU)."""

    def __init__(self, group: dist.ProcessGroup | None, stream: Any, device: torch.device) -> None:
        self.group, self.stream, self.device = group, stream, device
        self.event = None if stream is None else torch.get_device_module(device).Event()
        # NCCL's wait() orders streams and returns at once; any other backend blocks the caller,
        # who then does better to wait at the end of backward.
        self.wait_blocks = stream is None or "nccl" not in str(dist.get_backend(group))

    def entered(self, after: Iterable[Any] = ()) -> Any:
        """Context: work issued inside runs on this lane, after what is queued on ``after``."""
        if self.stream is None:
            return nullcontext()
        for stream in after:
            self.stream.wait_stream(stream)
        return torch.get_device_module(self.device).stream(self.stream)

    def keep_until_done(self, tensors: Iterable[Tensor]) -> None:
        """Tell the allocator that this lane's stream reads the tensors."""
        if self.stream is not None:
            for tensor in tensors:
                tensor.record_stream(self.stream)

    def mark_done(self) -> None:
        """Record the point that :meth:`join` makes another stream wait for."""
        if self.event is not None:
            self.event.record(self.stream)

    def join(self) -> None:
        """Make the current stream wait for the last :meth:`mark_done`."""
        if self.event is not None:
            current_stream(self.device).wait_event(self.event)


def current_stream(device: torch.device) -> Any:
    """The current stream of an accelerator; None on the CPU, which has none."""
    return None if device.type == "cpu" else torch.get_device_module(device).current_stream(device)


def make_lanes(groups: Sequence[dist.ProcessGroup], device: torch.device) -> list[Lane]:
    """One lane per process group, with a new stream on accelerators.

    Args:
        device: where the gradients live.
    """
    if device.type == "cpu":
        return [Lane(group, None, device) for group in groups]
    make_stream = torch.get_device_module(device).Stream
    return [Lane(group, make_stream(device), device) for group in groups]


@contextmanager
def profiled(name: str) -> Iterator[None]:
    """A named range for torch.profiler, and for NVTX where CUDA is in use."""
    with torch.profiler.record_function(name):
        if not torch.cuda.is_available():
            yield
            return
        with torch.cuda.nvtx.range(name):
            yield
