"""Where layer normalization is torch's: a few rows on the CPU.

A call of ours costs Python (checks, an autograd function) where torch's is C++. A choice of
algorithm by size, as measured by the benchmark norm_sizes: not by whether gradients are wanted, so
that a forward that is repeated for its gradients gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._shared.native.targets import is_emulating

# Up to this many elements: beyond, ours is faster.
ELEMENTS = 65_536
# Up to this many rows, of at least so many columns: elsewhere torch's gradients are off by more
# than twice the error of plain float32. It adds rows up one by one, and of 16-bit tensors it adds,
# and keeps mean and rstd, in 16 bits.
ROWS, COLUMNS = 4, 32

_IS_EMULATING = is_emulating()  # a GPU, which then serves CPU tensors


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: int | Sequence[int],
    eps: float,
) -> Tensor | None:
    """Return torch's layer normalization where that is the faster one, else None.

    None, too, for whatever torch refuses: our own checks say what is wrong with it, if anything.
    """
    try:
        # Before its size is looked at: that would be a guard in compiled code, which keeps our
        # operators whole.
        if type(x) is not Tensor or torch.compiler.is_compiling():
            return None
        if isinstance(shape, int):
            shape = (shape,)
        size, dtype, columns = x.numel(), x.dtype, math.prod(shape)
        if size > ELEMENTS or size > ROWS * columns or columns < COLUMNS:
            return None
        # Autocast has rules of its own.
        if not x.is_cpu or x.is_nested or _IS_EMULATING or torch.is_autocast_enabled("cpu"):
            return None
        if weight is None:
            if bias is not None:
                return None
        elif weight.dtype != dtype or (bias is not None and bias.dtype != dtype):
            return None
        if not 0 <= eps < math.inf:
            return None
        return torch.layer_norm(x, shape, weight, bias, eps)
    except (AttributeError, RuntimeError, TypeError):
        return None
