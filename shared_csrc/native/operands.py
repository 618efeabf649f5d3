"""Dtypes that operators take, and what becomes of operands before they are called."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_floating(name: str, argument: str, tensor: Tensor) -> None:
    """Raise TypeError unless a tensor has one of ``FLOATS``; ``name`` is the function's."""
    if type(tensor) is Tensor and tensor.dtype in FLOATS:
        return
    if not isinstance(tensor, Tensor) or tensor.dtype not in FLOATS:
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(
            f"{name}: {argument} must be a float64, float32, float16 or bfloat16 tensor, got {got}."
        )


def exact(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor as kernels take it: contiguous, and in ``dtype`` if one is given.

    Call it before a formula: torch differentiates both by itself.
    """
    tensor = tensor.contiguous()
    return tensor if dtype is None or tensor.dtype == dtype else tensor.to(dtype)
