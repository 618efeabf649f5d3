"""A matrix of more than 2^31 elements, most of which are the same few megabytes of memory.

A window of zeros is mapped over and over into one range of addresses; only the last megabyte is
memory of its own. What the operator returns is memory: 4 GB.
"""

import ctypes
import mmap
import os

import pytest
import torch

from apex.normalization.fused_layer_norm import ops

COLUMNS = 4096
TAIL = 3  # rows that are not zero, beyond element 2^31
ROWS = 2**31 // COLUMNS + TAIL
WINDOW_BYTES, OWN_BYTES = 16 << 20, 1 << 20
NEEDED_BYTES = 6 << 30
EPS = 1e-5


def free_bytes():
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(os, "memfd_create") or free_bytes() < NEEDED_BYTES,
        reason="maps memory through memfd_create, which Linux has, and needs 6 GB",
    ),
]


class Mapping:
    """A range of addresses backed by a repeated window; unmapped with the object."""

    def __init__(self, size):
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

    def _map(self, address, size, flags, descriptor):
        access = mmap.PROT_READ | mmap.PROT_WRITE
        # Reserves nothing: only the pages that are touched become memory.
        result = self._libc.mmap(address, size, access, flags | 0x4000, descriptor, 0)
        assert result != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        return result

    def __del__(self):
        self._libc.munmap(self.address, self.size)


def huge(tail):
    """A matrix of zeros whose last rows are ``tail``."""
    count = ROWS * COLUMNS * tail.element_size()
    mapping = Mapping(count)
    buffer = (ctypes.c_char * count).from_address(mapping.address)
    buffer.mapping = mapping  # lives as long as the tensor
    matrix = torch.frombuffer(buffer, dtype=tail.dtype).view(ROWS, COLUMNS)
    matrix[-TAIL:] = tail
    return matrix


def test_layer_norm_backward():
    """Both gradients of rows that begin beyond element 2^31; each touched page costs time."""
    x = torch.randn(TAIL, COLUMNS, dtype=torch.bfloat16)
    weight = torch.randn(COLUMNS, dtype=torch.bfloat16)
    _, mean, rstd = ops.layer_norm_forward(x, weight, None, COLUMNS, EPS)
    options = COLUMNS, EPS, torch.bfloat16, False, True
    expected = ops.layer_norm_backward(x, x, weight, None, mean, rstd, *options)
    rows = huge(x)
    means, rstds = torch.zeros(ROWS), torch.ones(ROWS)
    means[-TAIL:], rstds[-TAIL:] = mean, rstd
    actual = ops.layer_norm_backward(rows, rows, weight, None, means, rstds, *options)
    assert torch.equal(actual[0][-TAIL:], expected[0])
    assert actual[0][-TAIL - 1].eq(0).all()
    for a, e in zip(
        actual[1:], expected[1:], strict=True
    ):  # of blocks of rows that begin elsewhere
        torch.testing.assert_close(a, e, rtol=2**-8, atol=2**-20)
