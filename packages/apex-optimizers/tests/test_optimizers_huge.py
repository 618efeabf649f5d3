"""Tensors of more than 2^31 elements, most of which are the same few megabytes of memory.

A window of zeros is mapped over and over into one range of addresses; only the last megabyte is
memory of its own. Zeros stay zeros in all operations here, whoever writes them how often.
"""

import ctypes
import mmap
import os

import pytest
import torch

from apex.multi_tensor_apply import (
    multi_tensor_l2norm,
    multi_tensor_l2norm_scale,
    multi_tensor_scale,
)
from apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedLARS, FusedNovoGrad, FusedSGD

ELEMENTS = 2**31 + 70_003
WINDOW_BYTES, OWN_BYTES = 16 << 20, 1 << 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(os, "memfd_create"), reason="maps memory through memfd_create, which Linux has"
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


def huge_zeros(dtype):
    mapping = Mapping(ELEMENTS * dtype.itemsize)
    buffer = (ctypes.c_char * (ELEMENTS * dtype.itemsize)).from_address(mapping.address)
    buffer.mapping = mapping  # lives as long as the tensor
    return torch.frombuffer(buffer, dtype=dtype)


def huge(tail, dtype=None):
    tensor = huge_zeros(dtype or tail.dtype)
    tensor[-tail.numel() :] = tail
    return tensor


TAIL = 1000
OPTIMIZERS = {
    "adagrad": (FusedAdagrad, {"lr": 0.1}, ["sum"]),
    "adam": (FusedAdam, {"lr": 0.1}, ["exp_avg", "exp_avg_sq"]),
    "lamb": (FusedLAMB, {"lr": 0.1, "max_grad_norm": 0.0}, ["exp_avg", "exp_avg_sq"]),
    "lars": (FusedLARS, {"lr": 0.1, "momentum": 0.9}, ["momentum_buffer"]),
    "novograd": (FusedNovoGrad, {"lr": 0.1}, ["exp_avg"]),
    "sgd": (FusedSGD, {"lr": 0.1}, []),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(name):
    """The tail is updated as a small parameter would be; norms see nothing but the tail."""
    cls, options, moments = OPTIMIZERS[name]
    value, grad = torch.randn(TAIL).half(), torch.randn(TAIL).half()
    small = torch.nn.Parameter(value.clone())
    param = torch.nn.Parameter(huge(value))
    param.grad, small.grad = huge(grad), grad.clone()
    optimizer, plain = cls([param], **options), cls([small], **options)
    plain.step()
    state = optimizer.state[param]
    for key in moments:  # as the first step would make them, in memory that there is
        like = plain.state[small][key]
        state[key] = huge(torch.zeros(TAIL), like.dtype)
    optimizer.step()
    # Norms of the small one are added up in another order; half precision hides all but ties.
    torch.testing.assert_close(param.detach()[-TAIL:], small.detach(), rtol=2**-10, atol=2**-20)
    assert not torch.equal(param.detach()[-TAIL:], value)
    assert param.detach()[-TAIL - 5 : -TAIL].eq(0).all()


def test_multi_tensor_ops():
    x, flag = huge(torch.randn(TAIL).half()), torch.zeros(1, dtype=torch.int32)
    y = huge_zeros(torch.float16)
    multi_tensor_scale([x], [y], flag, 0.5)
    assert torch.equal(y[-TAIL:], x[-TAIL:] * 0.5)
    expected = x[-TAIL:].double().norm()
    norm, _ = multi_tensor_l2norm([x], flag)
    torch.testing.assert_close(norm[0].double(), expected, rtol=1e-6, atol=0)
    norm, _ = multi_tensor_l2norm_scale([x], [y], flag, 2.0)
    torch.testing.assert_close(norm[0].double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(y[-TAIL:], x[-TAIL:] * 2)
    assert flag.item() == 0
    x[-3] = float("nan")
    multi_tensor_scale([x], [y], flag, 0.5)
    assert flag.item() == 1
