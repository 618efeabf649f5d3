"""Apex's extension module of rotary embeddings: its positional signatures over this wheel's ops.

Importable only where the kernels can run, because callers take the import as that answer. A
gradient is the transposed rotation of ``dy``; shapes and errors are those of the functions of
``apex.transformer.functional``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apex.parallel._ops import library
from apex.transformer.functional import checked_rope as _rope
from apex.transformer.functional import rotary_embedding as _ops

_device_type = "cuda" if torch.cuda.is_available() else "cpu"
library.require_for_import(__name__, "rotary_embedding", device_type=_device_type)

__all__ = [
    "backward",
    "backward_2d",
    "backward_cached",
    "backward_thd",
    "forward",
    "forward_2d",
    "forward_cached",
    "forward_thd",
]


@torch.no_grad()
def forward(t: Tensor, freqs: Tensor, transpose_output: bool) -> Tensor:
    """See :func:`apex.transformer.functional.fused_apply_rotary_pos_emb`."""
    tables = _rope.tables_of_angles(_name("forward"), t, freqs)
    return _rope.on_a_line(_name("forward"), t, *tables, transpose_output)


@torch.no_grad()
def backward(dy: Tensor, freqs: Tensor, transpose_output: bool) -> Tensor:
    """Gradient of ``t``, ``[sequence, batch, heads, d]`` as ``dy``."""
    tables = _rope.tables_of_angles(_name("backward"), dy, freqs)
    return _rope.on_a_line(_name("backward"), dy, *tables, transpose_output, _ON_A_LINE)


@torch.no_grad()
def forward_cached(t: Tensor, cos: Tensor, sin: Tensor, transpose_output: bool) -> Tensor:
    """See :func:`apex.transformer.functional.fused_apply_rotary_pos_emb_cached`."""
    name = _name("forward_cached")
    return _rope.on_a_line(name, t, *_tables(name, t, cos, sin), transpose_output)


@torch.no_grad()
def backward_cached(dy: Tensor, cos: Tensor, sin: Tensor, transpose_output: bool) -> Tensor:
    """Gradient of ``t``, ``[sequence, batch, heads, d]`` as ``dy``."""
    name = _name("backward_cached")
    tables = _tables(name, dy, cos, sin)
    return _rope.on_a_line(name, dy, *tables, transpose_output, _ON_A_LINE)


@torch.no_grad()
def forward_thd(t: Tensor, cu_seqlens: Tensor, freqs: Tensor) -> Tensor:
    """See :func:`apex.transformer.functional.fused_apply_rotary_pos_emb_thd`."""
    tables = _rope.tables_of_angles(_name("forward_thd"), t, freqs)
    return _rope.of_sequences(_name("forward_thd"), t, cu_seqlens, *tables)


@torch.no_grad()
def backward_thd(dy: Tensor, cu_seqlens: Tensor, freqs: Tensor) -> Tensor:
    """Gradient of ``t``, ``[tokens, heads, d]`` as ``dy``."""
    tables = _rope.tables_of_angles(_name("backward_thd"), dy, freqs)
    return _rope.of_sequences(_name("backward_thd"), dy, cu_seqlens, *tables, _ON_A_LINE)


@torch.no_grad()
def forward_2d(t: Tensor, cos_h: Tensor, sin_h: Tensor, cos_w: Tensor, sin_w: Tensor) -> Tensor:
    """Rotate an image ``[batch, img_h, img_w, heads, d]``; like ``t``, contiguous.

    See :func:`apex.transformer.functional.fused_apply_rotary_pos_emb_2d`.
    """
    return _of_image(_name("forward_2d"), t, (cos_h, sin_h, cos_w, sin_w))


@torch.no_grad()
def backward_2d(dy: Tensor, cos_h: Tensor, sin_h: Tensor, cos_w: Tensor, sin_w: Tensor) -> Tensor:
    """Gradient of the image, ``[batch, img_h, img_w, heads, d]`` as ``dy``."""
    inverse = _ops.rotary_embedding_2d_backward
    return _of_image(_name("backward_2d"), dy, (cos_h, sin_h, cos_w, sin_w), inverse)


_ON_A_LINE = _ops.rotary_embedding_backward


def _name(function: str) -> str:
    return f"{__name__}.{function}"


def _tables(name: str, t: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rope.table(name, "cos", t, cos), _rope.table(name, "sin", t, sin)


def _of_image(name: str, t: Tensor, tables: tuple[Tensor, ...], *rotate: Any) -> Tensor:
    if t.dim() != 5:
        raise ValueError(
            f"{name}: t must have shape [batch, img_h, img_w, heads, d], got {list(t.shape)}."
        )
    named = dict(zip(("cos_h", "sin_h", "cos_w", "sin_w"), tables, strict=True))
    height, width = t.shape[1:3]
    return _rope.on_a_plane(name, t.flatten(1, 2), height, width, named, *rotate).view(t.shape)
