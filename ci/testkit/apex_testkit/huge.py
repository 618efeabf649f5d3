"""Tensors of more than 2^31 elements, most of which are the same few megabytes of memory.

A window of zeros is mapped over and over into one range of addresses; only the last megabyte is
memory of its own. Zeros must stay zeros, whoever writes them how often.
"""

import ctypes
import mmap
import os

import pytest
import torch

WINDOW_BYTES, OWN_BYTES = 16 << 20, 1 << 20

needs_linux = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="maps memory through memfd_create, which Linux has"
)


class _Mapping:
    """A range of addresses backed by a repeated window; unmapped with the object."""

    def __init__(self, size: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        arguments = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.mmap.argtypes, self._libc.mmap.restype = arguments, ctypes.c_void_p
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.address = self._map(None, self.size, anonymous, -1)
        shared, window = self.size - OWN_BYTES, os.memfd_create("zeros")
        os.ftruncate(window, WINDOW_BYTES)
        for offset in range(0, shared, WINDOW_BYTES):
            count = min(WINDOW_BYTES, shared - offset)
            self._map(self.address + offset, count, mmap.MAP_SHARED | 0x10, window)  # MAP_FIXED
        os.close(window)

    def _map(self, address: int | None, size: int, flags: int, descriptor: int) -> int:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        # Reserves nothing: only the pages that are touched become memory.
        result = self._libc.mmap(address, size, access, flags | 0x4000, descriptor, 0)
        assert result != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        return result

    def __del__(self) -> None:
        self._libc.munmap(self.address, self.size)


def huge_zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    """``count`` zeros, of which the last megabyte may be written."""
    size = count * dtype.itemsize
    mapping = _Mapping(size)
    buffer = (ctypes.c_char * size).from_address(mapping.address)
    buffer.mapping = mapping  # lives as long as the tensor
    return torch.frombuffer(buffer, dtype=dtype)
