"""Runs float16 matrix products and convolutions on the CPU through float32, while amp needs it.

Unless a CPU has float16 instructions that oneDNN uses, torch computes these ops in reference loops:
measured with torch 2.10 to 2.15 on such a CPU, the backward pass of a 512x1024x1024 linear layer
took 1246 ms (float32: 12 ms), that of a 3x3 convolution over 16x64x16x16 34 ms (float32: 2 ms).
Where oneDNN does have float16, only the backward pass of convolutions is left to a reference loop.

Products of few terms stay with torch's own loops, which then take less time than the casts.

Operands are rounded to float16 already, so nothing is lost: products are exact, sums are taken in
float32, and the result is rounded once. All other dtypes go to torch's own kernels unchanged.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._shared.native.half_matmul import FEW as _FEW
from .._shared.native.half_matmul import cpu_multiplies_float16

_CONVOLUTION_BACKWARD = "convolution_backward"
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addmv", "addbmm", "dot", "vdot")
# Op -> where its matrices begin among the arguments; those with a choice between both ways.
_MATRICES = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
# Op -> number of leading outputs to round back to float16; the rest (log-sum-exp) stays float32.
_OPS = {
    "convolution": 1,
    _CONVOLUTION_BACKWARD: 3,
    **dict.fromkeys(_PRODUCTS, 1),
    _ATTENTION: 1,
    f"{_ATTENTION}_backward": 3,
}
# What compiled code calls: the result goes to memory that it has planned.
_OUT_OPS = tuple(_MATRICES)


@contextlib.contextmanager
def float16_through_float32() -> Iterator[None]:
    """Replace torch's CPU kernels of the ops above within the context."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch warns of kernels that replace its own, which is intended here.
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name, rounded in _slow_ops().items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            run = _through_float32(kernel, rounded)
            if name in _MATRICES:
                run = _if_many(kernel, run, _MATRICES[name])
            library.impl(name, run, "CPU", with_keyset=True)
            if name in _OUT_OPS:
                out_kernel = torch.library.get_kernel(f"aten::{name}.out", "CPU")
                out = _out_through_float32(out_kernel, kernel)
                library.impl(f"{name}.out", out, "CPU", with_keyset=True)
    yield
    del library  # torch then restores its own kernels


def _slow_ops() -> dict[str, int]:
    if cpu_multiplies_float16():
        return {_CONVOLUTION_BACKWARD: _OPS[_CONVOLUTION_BACKWARD]}
    return _OPS


def _is_float16(args: tuple) -> bool:
    """Whether the operands are in float16: those of the ops above are among three arguments.

    If only some of them are, torch's own kernel refuses the call, as it does on a GPU.
    """
    return all(t.dtype is torch.float16 for t in args[:3] if isinstance(t, torch.Tensor))


def _float(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype is torch.float16
    return value.float() if is_half else value


def _half(value: Any) -> Any:
    return value.half() if isinstance(value, torch.Tensor) else value


def _in_float32(kernel: Any, keys: Any, args: tuple, kwargs: dict) -> Any:
    kwargs = {name: _float(value) for name, value in kwargs.items()}
    return kernel.call_boxed(keys, *map(_float, args), **kwargs)


def _through_float32(kernel: Any, rounded: int) -> Callable[..., Any]:
    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_float16(args):
            return kernel.call_boxed(keys, *args, **kwargs)
        result = _in_float32(kernel, keys, args, kwargs)
        if not isinstance(result, tuple):
            return _half(result)
        return (*map(_half, result[:rounded]), *result[rounded:])

    return run


def _if_many(kernel: Any, through_float32: Callable[..., Any], first: int) -> Callable[..., Any]:
    """The kernel itself for other dtypes and for few multiplications, without further questions."""
    float16, call = torch.float16, kernel.call_boxed

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        matrix = args[first]
        if matrix.dtype is not float16 or matrix.numel() * args[first + 1].shape[-1] <= _FEW:
            return call(keys, *args, **kwargs)
        return through_float32(keys, *args, **kwargs)

    return run


def _out_through_float32(out_kernel: Any, kernel: Any) -> Callable[..., Any]:
    def run(keys: Any, *args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if out.dtype is not torch.float16 or not _is_float16(args):
            return out_kernel.call_boxed(keys, *args, out=out, **kwargs)
        result = _in_float32(kernel, keys, args, kwargs)
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return run
