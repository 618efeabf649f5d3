"""Apex's extension module that adds a linear layer's weight gradient to a buffer, in place.

torch's products do this on every device; on a GPU, cuBLASLt or hipBLASLt does it where one of them
serves. Callers look the functions up here when they call them, so other projects may replace them.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["wgrad_gemm_accum_fp16", "wgrad_gemm_accum_fp32"]

_CHUNK = 4096  # tokens whose 16-bit values are float32 at a time on a CPU


@torch.no_grad()
def wgrad_gemm_accum_fp32(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """``d_weight += d_output.T @ input``, with products and sums in float32.

    Args:
        input: ``[..., in_features]``; float32, float16 or bfloat16.
        d_output: ``[..., out_features]``, the same dtype and leading dimensions.
        d_weight: ``[out_features, in_features]`` float32, in any memory layout.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: shapes or devices do not fit. ``d_weight`` is unchanged then.

    On NVIDIA GPUs the products of 16-bit numbers are added up by tensor cores, which cut off each
    partial sum instead of rounding it: results are nearer to zero by some units in the last place.
    """
    name = "wgrad_gemm_accum_fp32"
    floats = (torch.float32, torch.float16, torch.bfloat16)
    if d_weight.dtype != torch.float32 or input.dtype not in floats:
        raise TypeError(
            f"{name}: expected d_weight in float32 and input in float32, float16 or bfloat16, "
            f"got {d_weight.dtype} and {input.dtype}."
        )
    x, dy = _matrices(name, input, d_output, d_weight)
    with torch.autocast(x.device.type, enabled=False):
        if x.dtype == torch.float32:
            d_weight.addmm_(dy.t(), x)
        elif _is_added_by_library(x, dy, d_weight):
            pass
        elif x.is_cuda:
            torch.addmm(d_weight, dy.t(), x, out_dtype=torch.float32, out=d_weight)
        else:
            for some_x, some_dy in zip(x.split(_CHUNK), dy.split(_CHUNK), strict=True):
                d_weight.addmm_(some_dy.t().float(), some_x.float())


def _is_added_by_library(x: Tensor, dy: Tensor, d_weight: Tensor) -> bool:
    from apex.transformer.weight_gradient import add_weight_gradient

    return add_weight_gradient(x, dy, d_weight)


@torch.no_grad()
def wgrad_gemm_accum_fp16(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """``d_weight += d_output.T @ input``, rounded to the 16-bit dtype that all three have.

    Args and errors are those of :func:`wgrad_gemm_accum_fp32`, with ``d_weight`` in float16 or
    bfloat16 like the others.
    """
    name = "wgrad_gemm_accum_fp16"
    if d_weight.dtype not in (torch.float16, torch.bfloat16) or input.dtype != d_weight.dtype:
        raise TypeError(
            f"{name}: expected input and d_weight both in float16 or both in bfloat16, "
            f"got {input.dtype} and {d_weight.dtype}."
        )
    x, dy = _matrices(name, input, d_output, d_weight)
    with torch.autocast(x.device.type, enabled=False):
        d_weight.addmm_(dy.t(), x)


def _matrices(name: str, x: Tensor, dy: Tensor, dw: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` and ``dy`` with one dimension of tokens, if the three fit."""
    if dy.dtype != x.dtype:
        raise TypeError(f"{name}: input is {x.dtype}, d_output is {dy.dtype}; expected the same.")
    fits = x.dim() >= 2 and x.shape[:-1] == dy.shape[:-1]
    if not fits or dw.shape != (dy.shape[-1], x.shape[-1]):
        raise ValueError(
            f"{name}: expected input [..., in], d_output [..., out] and d_weight [out, in], "
            f"got {list(x.shape)}, {list(dy.shape)} and {list(dw.shape)}."
        )
    if len({x.device, dy.device, dw.device}) > 1:
        raise ValueError(
            f"{name}: expected one device, got {x.device}, {dy.device} and {dw.device}."
        )
    return x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
