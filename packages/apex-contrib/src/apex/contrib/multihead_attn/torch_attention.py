"""Attention by torch's own fused functions, and where they are called in place of the composition.

They never write the scores, so long sequences take less time and memory. They have no dropout that
other devices repeat, return no weights, and their gradients cannot be differentiated again.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "attend_packed",
    "attend_without_weights",
    "mask_kind",
    "serves_packed",
    "takes_sdpa",
    "takes_varlen",
    "varlen_parameters",
]

_HALVES = torch.float16, torch.bfloat16
# What varlen_attn is given by position: in torch 2.10 to 2.15 the same. What follows has changed:
# is_causal became window_size. By default, every token of a sequence sees all others of it.
_VARLEN = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")
_MAX_VARLEN_SIZE = 256  # features of a head that flash attention takes


def mask_kind(mask: Tensor | None, is_time_mask: bool, is_added: bool, dtype: Any) -> str:
    """What a mask is for :func:`takes_sdpa`: "none", "padding", "time", "added", "rounded".

    torch adds a mask in the dtype of the scores: one of another dtype would be "rounded".
    """
    if mask is None:
        return "none"
    if is_added:
        return "added" if mask.dtype == dtype else "rounded"
    return "time" if is_time_mask else "padding"


def takes_sdpa(device_type: str, p: float, mask: str, needs_weights: bool) -> bool:
    """Whether ``scaled_dot_product_attention`` is called.

    Args:
        device_type: of the inputs.
        p: probability of dropout; 0 outside training.
        mask: see :func:`mask_kind`.
        needs_weights: whether the caller asks for the weights.
    """
    return device_type == "cuda" and p == 0 and mask != "rounded" and not needs_weights


def attend_without_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    scale: float,
    mask: Tensor | None,
    is_time_mask: bool,
    is_added: bool,
) -> Tensor:
    """``softmax(scale * q @ k^T + mask) @ v`` ``[b * heads, sq, d]``; NaN where all is hidden.

    Args:
        q, k, v: ``[b * heads, sq, d]`` and ``[b * heads, sk, d]``.
        mask: ``[b, sk]``, or with ``is_time_mask`` ``[sq, sk]``; hides what is not 0, or with
            ``is_added`` is added.
    """
    q, k, v = (x.view(x.shape[0] // heads, heads, *x.shape[1:]) for x in (q, k, v))
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, scale=scale).flatten(0, 1)
    seen = mask if is_added else mask == 0
    seen = seen if is_time_mask else seen[:, None, None]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    # torch gives 0 or NaN, depending on the kernel. A factor makes gradients NaN, too.
    sees_none = (seen == -torch.inf if is_added else ~seen).all(-1, keepdim=True)
    return (y * torch.where(sees_none, torch.nan, 1.0).to(y.dtype)).flatten(0, 1)


def takes_varlen(
    device_type: str,
    is_rocm: bool,
    dtype: torch.dtype,
    size: int,
    p: float,
    has_flash: bool,
    parameters: tuple[str, ...],
) -> bool:
    """Whether ``torch.nn.attention.varlen.varlen_attn`` is called for packed sequences.

    Args:
        device_type, dtype: of the inputs.
        is_rocm: whether torch is built for AMD's GPUs, on which it has not been tried.
        size: features of a head.
        p: probability of dropout; 0 outside training.
        has_flash: whether the GPU has flash attention and the user allows it.
        parameters: names of the function's parameters.
    """
    if device_type != "cuda" or is_rocm or p != 0 or not has_flash:
        return False
    fits = dtype in _HALVES and size % 8 == 0 and 0 < size <= _MAX_VARLEN_SIZE
    return fits and parameters[: len(_VARLEN)] == _VARLEN


def serves_packed(qkv: Tensor, p: float) -> bool:
    """:func:`takes_varlen` for ``[total, 3, heads, d]``; compiled code does not ask the driver."""
    if not qkv.is_cuda or torch.compiler.is_compiling():
        return False
    has_flash = torch.backends.cuda.flash_sdp_enabled() and _is_ampere(qkv.device)
    is_rocm, parameters = torch.version.hip is not None, varlen_parameters()
    return takes_varlen("cuda", is_rocm, qkv.dtype, qkv.shape[3], p, has_flash, parameters)


@functools.cache
def _is_ampere(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def varlen_parameters() -> tuple[str, ...]:
    """Names of the parameters of this torch's ``varlen_attn``; none without that function."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return ()
    return tuple(inspect.signature(varlen_attn).parameters)


def attend_packed(qkv: Tensor, cu_seqlens: Tensor, max_s: int) -> Tensor:
    """Attention of packed sequences ``[total, 3, heads, d]``: ``[total, heads, d]``.

    Tokens outside of all sequences give 0. The kernels leave their results, and their gradients,
    unwritten.
    """
    from torch.nn.attention.varlen import varlen_attn

    starts = cu_seqlens.to(torch.int32)
    tokens = torch.arange(qkv.shape[0], device=qkv.device)
    is_inside = ((tokens >= starts[0]) & (tokens < starts[-1]))[:, None, None]
    q, k, v = torch.where(is_inside[..., None], qkv, 0).unbind(1)
    y = varlen_attn(q, k, v, starts, starts, max_s, max_s)
    return torch.where(is_inside, y, 0)
