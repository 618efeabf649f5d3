"""Whether this CPU multiplies float16 matrices, or leaves them to torch's reference loops.

Unless a CPU has float16 instructions that oneDNN uses (AVX512-FP16 or AMX-FP16), torch computes
float16 products in scalar loops: with torch 2.10 to 2.15, the backward pass of a 512x1024x1024
linear layer took 1246 ms (float32: 12 ms). Through float32 nothing is lost: products of float16
numbers are exact there, sums are taken in float32 either way, and the result is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Multiplications up to which torch's loops win: 16x16 times 16x16 took 6 us, through float32 11 us;
# 32x32 times 32x32 took 18 us and 12 us (torch 2.13, one thread).
FEW = 16**3


def cpu_multiplies_float16() -> bool:
    """Whether oneDNN, and so torch, has float16 products on this CPU."""
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return probe is not None and probe()


_is_slow = not cpu_multiplies_float16()  # asked once: compilers take it for a constant


def is_slow(x: Tensor) -> bool:
    """Whether ``x`` is float16 on a CPU without float16 products."""
    return x.dtype is torch.float16 and _is_slow and x.device.type == "cpu"


def needs_float32(x: Tensor, *weights: Tensor) -> bool:
    """Whether rows of ``x``, ``[..., K]``, should be multiplied with the weights in float32."""
    if not is_slow(x):
        return False
    rows = x.numel() // max(x.shape[-1], 1)
    return rows * max(weight.numel() for weight in weights) > FEW
