"""Apex's extension module of fmha: its positional signatures over this wheel's ops.

Importable only where the kernels can run, because callers take the import as that answer. Any
floating-point dtype, head size and length is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex.contrib._ops import library
from apex.contrib._shared.native.half_matmul import needs_float32
from apex.contrib._shared.native.philox import draw_seed
from apex.contrib.fmha.packed import Layout, check_packed, pad, unpad
from apex.contrib.multihead_attn import mask_softmax_dropout as _ops

library.require_for_import(__name__, "mask_softmax_dropout")

__all__ = ["bwd", "bwd_nl", "fwd", "fwd_nl"]


def _by_head(packed: Tensor, layout: Layout) -> Tensor:
    """``[total, ..., heads, d]`` as ``[..., b * heads, s, d]``, padded."""
    padded = pad(packed, layout).movedim(1, -2)  # [b, ..., heads, s, d]
    return padded.movedim(0, -4).flatten(-4, -3)


def _wide(qkv: Tensor) -> torch.dtype:
    """What products are computed in: float32 where the CPU has none of float16."""
    return torch.float32 if needs_float32(qkv, qkv) else qkv.dtype


def _by_token(by_head: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """``[b * heads, s, d]`` as ``[total, heads, d]``."""
    padded = by_head.unflatten(0, (layout.batch, -1)).transpose(1, 2)
    return unpad(padded, layout).to(dtype)


@torch.no_grad()
def fwd(
    qkv: Tensor,
    cu_seqlens: Tensor,
    p_dropout: float,
    max_seq_len: int,
    is_training: bool,
    is_nl: bool = False,
    zero_tensors: bool = False,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """Return results ``[total, heads, d]`` and softmax ``[b, heads, s, s]`` for the backward.

    Args:
        qkv: ``[total, 3, heads, d]``.
        cu_seqlens: ``[b + 1]`` int32: where each sequence begins, and the last one ends.
        p_dropout, is_training: see :class:`apex.contrib.fmha.FMHAFun`.
        max_seq_len: ``s``.
        is_nl, zero_tensors: have no effect.
        generator: what the seed is drawn from, instead of the default generator.

    Softmax is negative where dropout dropped it.

    Raises:
        TypeError, ValueError: see :class:`apex.contrib.fmha.FMHAFun`.
    """
    p = p_dropout if is_training else 0.0
    check_packed("fmhalib.fwd", qkv, cu_seqlens, max_seq_len, p)
    layout = Layout(cu_seqlens, qkv.shape[0], max_seq_len)
    q, k, v = _by_head(qkv.to(_wide(qkv)), layout)
    heads = qkv.shape[2]
    scores = torch.bmm(q * q.shape[-1] ** -0.5, k.transpose(1, 2))
    scores = scores.view(layout.batch, heads, max_seq_len, max_seq_len)
    if p == 0:
        dropped = softmax = signed = _ops.mask_softmax_forward(scores, layout.mask)
    else:
        seed = draw_seed(qkv.device, generator=generator)
        dropped, softmax = _ops.mask_softmax_dropout_forward(scores, layout.mask, seed, p)
        signed = torch.where(dropped != 0, softmax, -softmax)
    out = torch.bmm(dropped.flatten(0, 1), v)
    return [_by_token(out, layout, qkv.dtype), signed.to(qkv.dtype)]


fwd_nl = fwd
""":func:`fwd`, under the name of Apex's variant for few sequences."""


@torch.no_grad()
def bwd(
    dout: Tensor,
    qkv: Tensor,
    softmax: Tensor,
    cu_seqlens: Tensor,
    p_dropout: float,
    max_seq_len: int,
    zero_tensors: bool = False,
) -> list[Tensor]:
    """Return gradients of ``qkv``, and of the scores ``[b, heads, s, s]``.

    ``dout`` is ``[total, heads, d]``, or of any shape of as many elements; ``softmax`` is what
    :func:`fwd` gave. ``p_dropout`` must be 0 if that was without training.
    """
    check_packed("fmhalib.bwd", qkv, cu_seqlens, max_seq_len, p_dropout)
    layout, heads, size = Layout(cu_seqlens, len(qkv), max_seq_len), *qkv.shape[2:]
    q, k, v = _by_head(qkv.to(_wide(qkv)), layout)
    dy = _by_head(dout.reshape(-1, heads, size).to(q.dtype), layout)
    signed = softmax.to(q.dtype)
    scale = 1 / (1 - p_dropout) if p_dropout < 1 else 0.0
    kept = signed.clamp(min=0)
    d_dropped = torch.bmm(dy, v.transpose(1, 2)).view(signed.shape)
    given = (d_dropped, None, signed.abs().contiguous(), kept.contiguous(), p_dropout)
    d_scores = _ops.mask_softmax_dropout_backward(*given)
    ds, factor = d_scores.flatten(0, 1), size**-0.5
    dq, dk = torch.bmm(ds, k) * factor, torch.bmm(ds.transpose(1, 2), q) * factor
    dv = torch.bmm(kept.flatten(0, 1).transpose(1, 2), dy) * scale
    each = [_by_token(d, layout, qkv.dtype) for d in (dq, dk, dv)]
    return [torch.stack(each, 1), d_scores.to(qkv.dtype)]


def bwd_nl(
    dout: Tensor,
    qkv: Tensor,
    softmax: Tensor,
    cu_seqlens: Tensor,
    p_dropout: float,
    max_seq_len: int,
    zero_tensors: bool = False,
) -> list[Tensor]:
    """:func:`bwd`, and the gradients of keys and values again, ``[total, 2, heads, d]``."""
    given = (dout, qkv, softmax, cu_seqlens, p_dropout, max_seq_len, zero_tensors)
    dqkv, d_scores = bwd(*given)
    return [dqkv, d_scores, dqkv[:, 1:]]
