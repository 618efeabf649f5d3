"""Which dtypes normalization takes, computes in and returns, and the casts to what kernels take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_HALVES = (torch.float16, torch.bfloat16)


def statistics_dtype(x_dtype: torch.dtype) -> torch.dtype:
    """The dtype of mean and rstd, in which everything is computed."""
    return torch.float64 if x_dtype == torch.float64 else torch.float32


def rms_eps(x: Any, eps: float | None) -> float:
    """What ``eps=None`` means: as torch, machine epsilon of the dtype that is computed in."""
    if eps is not None:
        return eps
    return torch.finfo(statistics_dtype(getattr(x, "dtype", None))).eps


def kernel_dtypes(
    x_dtype: torch.dtype, weight_dtype: torch.dtype, from_output: bool = False
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of input and weight to cast to, so that a kernel takes the pair.

    Kernels take equal dtypes and, unless they work from the output, a 16-bit input with a float32
    weight. Other pairs go to the wider of the two, at least float32: the casts before the kernel
    are exact, and the result is rounded once more only to a dtype that it has to be rounded to
    anyhow.
    """
    if x_dtype == weight_dtype:
        return x_dtype, weight_dtype
    if x_dtype in _HALVES and weight_dtype == torch.float32 and not from_output:
        return x_dtype, weight_dtype
    if torch.float64 in (x_dtype, weight_dtype):
        return torch.float64, torch.float64
    return torch.float32, torch.float32


def cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return ``tensor`` in ``dtype``; itself when it has that, which costs no call of torch."""
    if tensor is None or tensor.dtype == dtype:
        return tensor
    return tensor.to(dtype)


def operand(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return ``tensor`` as kernels take it: contiguous and in ``dtype``; itself if it is that."""
    if tensor is None:
        return None
    tensor = tensor.contiguous()
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
