"""Pools of CUDA's streams, and names of streams."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch


def get_stream_name(stream_idx: int) -> str:
    """The name of a stream: ``default_stream`` for 0, ``stream1`` for 1.

    Raises:
        ValueError: ``stream_idx`` is negative.
    """
    if stream_idx < 0:
        raise ValueError(f"get_stream_name: stream_idx must be at least 0, got {stream_idx}.")
    return "default_stream" if stream_idx == 0 else f"stream{stream_idx}"


class CUDAStreamPool:
    """Streams of one device, handed out in turn.

    As a context manager it gives a stream, and takes it back at the end.

    Args:
        device: of CUDA; default: the current one.
        pool_size: how many streams there are, ``>= 1``.

    Raises:
        RuntimeError: there is no CUDA device.
        ValueError: ``pool_size`` is less than 1.

    Example:
        >>> with CUDAStreamPool() as stream:  # doctest: +SKIP
        ...     with torch.cuda.stream(stream):
        ...         y = x * 2
    """

    def __init__(self, device: Any = None, pool_size: int = 8) -> None:
        if pool_size < 1:
            raise ValueError(f"CUDAStreamPool: pool_size must be at least 1, got {pool_size}.")
        if not torch.cuda.is_available():
            raise RuntimeError(
                "CUDAStreamPool: torch sees no CUDA device, so there are no streams to hand out."
            )
        self.device = torch.device("cuda", torch.cuda._utils._get_device_index(device, True))
        self.pool_size = pool_size
        self._free = [torch.cuda.Stream(self.device) for _ in range(pool_size)]
        self._entered: list[tuple[int, torch.cuda.Stream]] = []  # by which thread
        self._lock = threading.Lock()

    def acquire(self) -> torch.cuda.Stream:
        """The stream that was free for the longest time. Streams that are all taken are shared."""
        with self._lock:
            stream = self._free.pop(0)
            self._free.append(stream)
            return stream

    def release(self, stream: torch.cuda.Stream) -> None:
        """Give a stream back: it is the next to be handed out.

        Raises:
            ValueError: the stream is not of this pool.
        """
        with self._lock:
            if stream not in self._free:
                raise ValueError(f"CUDAStreamPool.release: {stream} is not of this pool.")
            self._free.remove(stream)
            self._free.insert(0, stream)

    def __enter__(self) -> torch.cuda.Stream:
        stream = self.acquire()
        with self._lock:
            self._entered.append((threading.get_ident(), stream))
        return stream

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        with self._lock:  # this thread's last, or another's, which may have entered for this one
            own = [
                i for i, (thread, _) in enumerate(self._entered) if thread == threading.get_ident()
            ]
            _, stream = self._entered.pop(own[-1] if own else -1)
        self.release(stream)


def get_cuda_stream_pool(device: Any = None, pool_size: int = 32) -> CUDAStreamPool:
    """The pool of a device and size, which is made once.

    Arguments and errors are those of :class:`CUDAStreamPool`.
    """
    index = torch.cuda._utils._get_device_index(device, True) if torch.cuda.is_available() else 0
    with _making:
        return _pool(index, pool_size)


_making = threading.Lock()  # functools.cache may call a function in two threads at once


@functools.cache
def _pool(index: int, pool_size: int) -> CUDAStreamPool:
    return CUDAStreamPool(torch.device("cuda", index), pool_size)
