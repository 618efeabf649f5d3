"""Where layer normalization is torch's: small tensors on the CPU.

Our call runs checks and an autograd function in Python; torch's call is C++. The benchmark
norm_sizes measures from which size on ours is faster.

torch's 16-bit results are as accurate as ours, but its 16-bit gradients are not: those of weight
and bias are summed over rows in 16 bits, and mean and rstd are kept in 16 bits unless the weight is
float32. Therefore the weight is cast for a single row, and several rows are left to our kernels:
casting everything to float32 for torch takes as long for 64x64, and longer beyond.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Up to this many elements: beyond, ours is faster.
ELEMENTS = 262_144
NARROW_ELEMENTS = 65_536  # of 16 bits
# Up to this many rows: torch adds them up one by one, which loses accuracy.
ROWS = 1024

_WIDE = (torch.float32, torch.float64)
_NARROW = (torch.float16, torch.bfloat16)
_INF = math.inf
_is_traced = torch.compiler.is_dynamo_compiling  # what other tracers pass is no plain Tensor
_is_autocast_enabled = torch.is_autocast_enabled


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: int | Sequence[int],
    eps: float,
    mixed: bool = False,
    zero_centered_gamma: bool = False,
) -> Tensor | None:
    """Return torch's layer normalization where that is the faster one, else None.

    Also None for operands that torch refuses: our own checks then raise, if something is wrong.

    Args:
        mixed: whether the weight may have another dtype than ``x``; the result then has the
            weight's.
        zero_centered_gamma: whether rows are multiplied by ``1 + weight``: a sum in what they are
            computed in, as in our kernels.
    """
    try:
        # Before its size is looked at: that would be a guard in compiled code, which keeps our
        # operators whole.
        if type(x) is not Tensor or _is_traced() or not 0 < x.numel() <= ELEMENTS:
            return None
        # Autocast has rules of its own.
        if not x.is_cpu or x.is_nested or _is_autocast_enabled("cpu") or _is_emulating():
            return None
        if not 0 <= eps < _INF or (weight is None and bias is not None):
            return None
        if isinstance(shape, int):
            shape = (shape,)
        if x.numel() > ROWS * math.prod(shape):
            return None
        is_centered = zero_centered_gamma and weight is not None
        if x.dtype in _WIDE:  # with weights of the same: torch refuses others
            return torch.layer_norm(x, shape, 1 + weight if is_centered else weight, bias, eps)
        return _narrow(x, weight, bias, shape, eps, mixed, is_centered)
    except (AttributeError, RuntimeError, TypeError):
        return None


def _narrow(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: Sequence[int],
    eps: float,
    mixed: bool,
    is_centered: bool,
) -> Tensor | None:
    """The same for 16-bit ``x``."""
    dtype = x.dtype
    if dtype not in _NARROW or x.numel() > NARROW_ELEMENTS:
        return None
    if weight is not None and weight.dtype != dtype:
        if not mixed:
            return None
        return torch.layer_norm(x.float(), shape, 1 + weight if is_centered else weight, bias, eps)
    if bias is not None and bias.dtype != dtype:
        return None
    has_grads = torch.is_grad_enabled()
    if not has_grads and not is_centered:
        return torch.layer_norm(x, shape, weight, bias, eps)
    parameters = [t for t in (weight, bias) if t is not None]
    is_row = x.numel() == math.prod(shape)
    if not parameters or (has_grads and not is_row and any(t.requires_grad for t in parameters)):
        return None
    weight, bias = (None if t is None else t.float() for t in (weight, bias))
    return torch.layer_norm(x, shape, 1 + weight if is_centered else weight, bias, eps)


@functools.cache
def _is_emulating() -> bool:
    """Whether an emulated GPU serves CPU tensors."""
    from .._shared.native.targets import is_emulating

    return is_emulating()
