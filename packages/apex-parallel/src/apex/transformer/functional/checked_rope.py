"""Rotary embeddings behind their checks, for functions, classes and an extension module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from ...parallel._shared.native.operands import check_floating, replicate_like
from .rotary_embedding import rotary_embedding, rotary_embedding_2d


def tables_of_angles(name: str, t: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[rows, d2]`` of angles ``[rows, 1, 1, d2]``, in float32 or float64."""
    check_floating(name, "t", t)
    check_floating(name, "freqs", freqs)
    is_wide = t.dtype == freqs.dtype == torch.float64
    angles = _rows(name, "freqs", t, freqs.detach().to(torch.float64 if is_wide else torch.float32))
    return angles.cos(), angles.sin()


def table(name: str, argument: str, t: Tensor, given: Tensor) -> Tensor:
    """A table ``[rows, d2]`` of ``[rows, 1, 1, d2]``."""
    check_floating(name, "t", t)
    return _rows(name, argument, t, _of_known_dtype(name, argument, t, given))


def tables_of_line(name: str, t: Tensor, cos_: Tensor, sin_: Tensor) -> tuple[Tensor, Tensor]:
    """Tables for :func:`on_a_line`, which has nothing to say of them and ``t``."""
    cos, sin = table(name, "cos_", t, cos_), table(name, "sin_", t, sin_)
    _check_line(name, t, cos, sin)
    return cos, sin


def _of_known_dtype(name: str, argument: str, t: Tensor, given: Tensor) -> Tensor:
    check_floating(name, argument, given)
    if given.dtype not in (torch.float32, t.dtype):
        raise TypeError(
            f"{name}: {argument} must be torch.float32 or the dtype of t, {t.dtype}; got "
            f"{given.dtype}."
        )
    return given.detach()


def _rows(name: str, argument: str, t: Tensor, given: Tensor) -> Tensor:
    rows, width = (given.shape[0], given.shape[-1]) if given.dim() == 4 else (0, 0)
    if given.shape != (rows, 1, 1, width) or width > t.shape[-1] or width % 2:
        raise ValueError(
            f"{name}: {argument} must have shape [positions, 1, 1, d2], d2 even and at most the "
            f"{t.shape[-1]} channels of t; got {list(given.shape)}."
        )
    _check_device(name, argument, t, given)
    return replicate_like(t, given.reshape(rows, width).contiguous())


def _check_device(name: str, argument: str, t: Tensor, given: Tensor) -> None:
    if given.device != t.device:
        raise ValueError(
            f"{name}: {argument} must be on {t.device}, as t is; it is on {given.device}."
        )


def _check_alike(name: str, cos: Tensor, sin: Tensor) -> None:
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"{name}: cosines and sines must be alike, got {list(cos.shape)} {cos.dtype} and "
            f"{list(sin.shape)} {sin.dtype}."
        )


def _check_dimensions(name: str, t: Tensor, shape: str) -> None:
    if t.dim() != shape.count(",") + 1:
        raise ValueError(f"{name}: t must have shape {shape}, got {list(t.shape)}.")


def on_a_line(
    name: str,
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    transpose_memory: bool,
    rotate: Callable[..., Tensor] = rotary_embedding,
) -> Tensor:
    """Rotate ``[sequence, batch, heads, d]`` by tables ``[rows, d2]``, or back."""
    _check_line(name, t, cos, sin)
    y = rotate(t.permute(1, 2, 0, 3), cos, sin, None, not transpose_memory)
    return y.permute(2, 0, 1, 3)


def _check_line(name: str, t: Tensor, cos: Tensor, sin: Tensor) -> None:
    _check_dimensions(name, t, "[sequence, batch, heads, d]")
    _check_alike(name, cos, sin)
    if cos.shape[0] < t.shape[0]:
        raise ValueError(
            f"{name}: there are angles for {cos.shape[0]} positions, but t has {t.shape[0]}: "
            f"{list(t.shape)}."
        )


def of_sequences(
    name: str,
    t: Tensor,
    cu_seqlens: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotate: Callable[..., Tensor] = rotary_embedding,
) -> Tensor:
    """Rotate ``[tokens, heads, d]``; positions restart where ``cu_seqlens`` says."""
    _check_dimensions(name, t, "[tokens, heads, d]")
    if not isinstance(cu_seqlens, Tensor):
        got = type(cu_seqlens).__name__
        raise TypeError(f"{name}: cu_seqlens must be an int32 or int64 tensor, got {got}.")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(
            f"{name}: cu_seqlens must have shape [sequences + 1], got {list(cu_seqlens.shape)}."
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}.")
    _check_device(name, "cu_seqlens", t, cu_seqlens)
    _check_starts(name, cu_seqlens, t.shape[0])
    tokens = torch.arange(t.shape[0], device=t.device)
    starts = cu_seqlens.to(torch.int64)
    # The last sequence that begins at or before a token; nothing waits for the device.
    own = torch.searchsorted(starts, tokens, right=True) - 1
    positions = tokens - starts[own.clamp(min=0)]
    x = t.unsqueeze(0).transpose(1, 2)
    y = rotate(x, cos, sin, replicate_like(t, positions), True)
    return y.transpose(1, 2).squeeze(0)


def _check_starts(name: str, cu_seqlens: Tensor, tokens: int) -> None:
    # A GPU would have to be waited for, and compiled code does not see numbers.
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    starts = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != tokens or any(a > b for a, b in pairwise(starts)):
        raise ValueError(
            f"{name}: cu_seqlens must rise from 0 to {tokens}, the tokens of t, got "
            f"{starts[:8]}{'...' if len(starts) > 8 else ''}. Give tokens behind the last sequence "
            "a sequence of their own."
        )


def on_a_plane(
    name: str,
    t: Tensor,
    img_h: int,
    img_w: int,
    tables: Mapping[str, Tensor],
    rotate: Callable[..., Tensor] = rotary_embedding_2d,
) -> Tensor:
    """Rotate ``[batch, img_h * img_w, heads, d]`` by rows and columns of an image."""
    check_floating(name, "t", t)
    _check_dimensions(name, t, "[batch, img_h * img_w, heads, d]")
    if img_h < 0 or img_w < 0:
        raise ValueError(f"{name}: img_h and img_w must be 0 or more, got {img_h} and {img_w}.")
    if t.shape[1] != img_h * img_w or t.shape[3] % 4:
        raise ValueError(
            f"{name}: t must have {img_h} * {img_w} tokens and a multiple of 4 channels, got "
            f"{list(t.shape)}."
        )
    given = []
    for argument, size in zip(tables, (img_h, img_h, img_w, img_w), strict=True):
        own = _of_known_dtype(name, argument, t, tables[argument])
        rows = own.shape[1] if own.dim() == 4 else 0
        if own.shape != (1, rows, 1, t.shape[3] // 2) or rows < size:
            raise ValueError(
                f"{name}: {argument} must have shape [1, {size} or more, 1, {t.shape[3] // 2}], "
                f"got {list(own.shape)}."
            )
        _check_device(name, argument, t, own)
        given.append(replicate_like(t, own.reshape(rows, -1).contiguous()))
    _check_alike(name, given[0], given[1])
    _check_alike(name, given[2], given[3])
    if given[0].dtype != given[2].dtype:
        given = [own.float() for own in given]
    return rotate(t.transpose(1, 2), *given, max(img_w, 1)).transpose(1, 2)
