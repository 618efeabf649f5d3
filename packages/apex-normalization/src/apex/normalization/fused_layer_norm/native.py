"""Where layer normalization is torch's: up to 65,536 elements on the CPU.

A call of ours costs Python (checks, an autograd function) where torch's is C++. A choice of
algorithm by size, as measured by the benchmark norm_sizes.

Never torch's 16-bit kernel: its backward adds rows up in 16 bits, and keeps mean and rstd in them.
A 16-bit call goes there in float32, with casts at both ends, where that is the faster way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Up to this many elements: beyond, ours is faster.
ELEMENTS = 65_536
# The same for 16-bit results, whose casts cost more the larger the tensors. Only with gradients:
# without, our forward is as fast at every size.
NARROW_ELEMENTS = 8192

_WIDE = (torch.float32, torch.float64)
_NARROW = (torch.float16, torch.bfloat16)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: int | Sequence[int],
    eps: float,
    mixed: bool = False,
) -> Tensor | None:
    """Return torch's layer normalization where that is the faster one, else None.

    None, too, for whatever torch refuses: our own checks say what is wrong with it, if anything.

    Args:
        mixed: whether the weight may have another dtype than ``x``, which then is the result's.
    """
    try:
        # Before its size is looked at: that would be a guard in compiled code, which keeps our
        # operators whole.
        if type(x) is not Tensor or torch.compiler.is_compiling():
            return None
        if not 0 < x.numel() <= ELEMENTS:
            return None
        # Autocast has rules of its own.
        if not x.is_cpu or x.is_nested or _is_emulating() or torch.is_autocast_enabled("cpu"):
            return None
        dtype = x.dtype
        if weight is None:
            if bias is not None:
                return None
        else:
            if bias is not None and bias.dtype != weight.dtype:
                return None
            if weight.dtype != dtype:
                if not mixed or weight.dtype != torch.float32 or dtype not in _NARROW:
                    return None
                x, dtype = x.float(), torch.float32
        if not 0 <= eps < math.inf:
            return None
        if isinstance(shape, int):
            shape = (shape,)
        if dtype in _WIDE:
            return torch.layer_norm(x, shape, weight, bias, eps)
        if dtype not in _NARROW or x.numel() > NARROW_ELEMENTS or not _wanted(x, weight, bias):
            return None
        weight = None if weight is None else weight.float()
        bias = None if bias is None else bias.float()
        return torch.layer_norm(x.float(), shape, weight, bias, eps).to(dtype)
    except (AttributeError, RuntimeError, TypeError):
        return None


@functools.cache
def _is_emulating() -> bool:
    """Whether an emulated GPU serves CPU tensors."""
    from .._shared.native.targets import is_emulating

    return is_emulating()


def _wanted(*tensors: Tensor | None) -> bool:
    """Whether any of these gets a gradient."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
