"""Which 16-bit matrix products this CPU has instructions for; the others go through float32.

Unless a CPU has float16 instructions that oneDNN uses (AVX512-FP16 or AMX-FP16), torch computes
float16 products in scalar loops: with torch 2.10 to 2.15, the backward pass of a 512x1024x1024
linear layer took 1246 ms (float32: 12 ms). Without bfloat16 instructions (AVX512-BF16 or AMX),
oneDNN emulates them: 1024x1024 times 1024x4096 took 150 ms, through float32 39 ms (torch 2.13, two
threads of an AVX-512 Xeon). Through float32 nothing is lost: products of 16-bit numbers are exact
there, sums are taken in float32 either way, and the result is rounded once.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor

# Multiplications up to which torch's loops win: 16x16 times 16x16 took 6 us, through float32 11 us;
# 32x32 times 32x32 took 18 us and 12 us (float16, torch 2.13, one thread).
FEW = 16**3
# Rows up to which oneDNN's emulation of bfloat16 wins: converting large weights takes longer than
# multiplying with them. 8x1024 times 1024x1024 took 0.8 ms, through float32 1.1 ms.
_FEW_ROWS = 8


def cpu_multiplies_float16() -> bool:
    """Whether oneDNN, and so torch, has float16 products on this CPU."""
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return probe is not None and probe()


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 instructions that oneDNN uses. Other than x86 are taken to."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    probes = "_is_avx512_bf16_supported", "_is_amx_tile_supported"
    found = [getattr(torch.cpu, probe, None) for probe in probes]
    return None in found or any(probe() for probe in found)


def slow_dtypes() -> tuple[torch.dtype, ...]:
    """The dtypes whose products this CPU leaves to loops or emulation."""
    served = {torch.float16: cpu_multiplies_float16(), torch.bfloat16: cpu_multiplies_bfloat16()}
    return tuple(dtype for dtype, is_served in served.items() if not is_served)


_slow = slow_dtypes()  # asked once: compilers take it for a constant


def is_slow(x: Tensor) -> bool:
    """Whether ``x`` is on a CPU without products of its dtype."""
    return x.dtype in _slow and x.device.type == "cpu"


def needs_float32(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether rows of ``x``, ``[..., K]``, should be multiplied with the weights in float32.

    Biases, which are smaller, and None may be among them.
    """
    if x.dtype not in _slow or not x.is_cpu:
        return False
    rows = x.numel() // max(x.shape[-1], 1)
    if x.dtype is torch.bfloat16 and rows <= _FEW_ROWS:
        return False
    return rows * max(w.numel() for w in weights if w is not None) > FEW
