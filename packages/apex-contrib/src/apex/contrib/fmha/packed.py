"""Attention of packed sequences: where each token goes in a padded batch, and the way back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from .._shared.native.operands import check_floating

__all__ = ["Layout", "check_packed", "pad", "spans", "unpad"]


class Layout:
    """Where tokens of packed sequences lie in a batch of ``[b, size]``.

    Args:
        cu_seqlens: ``[b + 1]``: where each sequence begins, and where the last one ends.
        total: tokens; those behind the last sequence belong to none.
        size: tokens of the longest sequence, at least; later ones belong to none.
    """

    def __init__(self, cu_seqlens: Tensor, total: int, size: int) -> None:
        starts = cu_seqlens.to(torch.int64)
        self.batch, self.size = starts.shape[0] - 1, size
        tokens = torch.arange(total, device=starts.device)
        sequence = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
        known = sequence.clamp(max=self.batch - 1)
        position = tokens - starts[known]
        self.is_inside = (sequence < self.batch) & (position >= 0) & (position < size)
        # The others share a row behind the batch.
        self.rows = torch.where(self.is_inside, known * size + position, self.batch * size)
        lengths = starts.diff()
        padding = torch.arange(size, device=starts.device) >= lengths[:, None]
        # An empty sequence hides nothing: its rows, which nobody reads, must not be NaN.
        self.mask = (padding & (lengths > 0)[:, None]).unsqueeze(1)


def pad(packed: Tensor, layout: Layout) -> Tensor:
    """``[total, ...]`` as ``[b, size, ...]`` with zeros; differentiable."""
    rows = layout.batch * layout.size
    padded = packed.new_zeros(rows + 1, *packed.shape[1:]).index_copy(0, layout.rows, packed)
    return padded[:rows].view(layout.batch, layout.size, *packed.shape[1:])


def unpad(padded: Tensor, layout: Layout) -> Tensor:
    """The inverse of :func:`pad`; tokens that belong to no sequence are 0."""
    flat = padded.flatten(0, 1)
    tokens = flat.index_select(0, layout.rows.clamp(max=flat.shape[0] - 1))
    inside = layout.is_inside.view(-1, *[1] * (tokens.dim() - 1))
    return torch.where(inside, tokens, 0)


def spans(cu_seqlens: Tensor) -> Iterator[tuple[int, int, int]]:
    """Index, begin and end of every sequence that has tokens."""
    for index, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        if begin < end:
            yield index, begin, end


def check_packed(name: str, qkv: Tensor, cu_seqlens: Tensor, max_s: int, p: float) -> None:
    """Raise TypeError or ValueError unless ``qkv`` is ``[total, 3, heads, d]`` of sequences."""
    check_floating(name, "qkv", qkv)
    if qkv.dim() != 4 or qkv.shape[1] != 3:
        raise ValueError(
            f"{name}: qkv must have shape [total, 3, heads, d], got {list(qkv.shape)}."
        )
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"{name}: cu_seqlens must be an int32 tensor, got {got}.")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.device != qkv.device:
        raise ValueError(
            f"{name}: cu_seqlens must have shape [batch + 1] on {qkv.device}, with a batch of 1 at "
            f"least, got {list(cu_seqlens.shape)} on {cu_seqlens.device}."
        )
    if max_s < 1:
        raise ValueError(f"{name}: max_s must be positive, got {max_s}.")
    if not 0 <= p <= 1:
        raise ValueError(f"{name}: p_dropout must be in [0, 1], got {p}.")
    # A GPU would have to be waited for, and compiled code does not see numbers.
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    starts = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    if starts[0] < 0 or min(lengths) < 0 or starts[-1] > len(qkv) or max(lengths) > max_s:
        raise ValueError(
            f"{name}: cu_seqlens must rise from 0 to at most {len(qkv)}, the tokens of qkv, by at "
            f"most max_s, {max_s}; got {starts[:8]}{'...' if len(starts) > 8 else ''}."
        )
