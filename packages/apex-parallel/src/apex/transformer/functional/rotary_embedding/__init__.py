"""Rotary position embeddings of tokens along a line, or over an image, with given tables."""

from __future__ import annotations

import torch
from torch import Tensor

from ....parallel._ops import library
from ....parallel._shared.native.formula import Formula

__all__ = ["decompositions", "rotary_embedding", "rotary_embedding_2d"]

# x and results: [batch, heads, sequence, channels]; tables: [rows, width], float32 or x's dtype.
# Results lie in memory as [sequence, batch, heads, channels], or with the batch first.


def _tokens_like(x: Tensor, tokens_first: bool) -> Tensor:
    b, h, s, d = x.shape
    if tokens_first:
        return x.new_empty((s, b, h, d)).permute(1, 2, 0, 3)
    return x.new_empty((b, s, h, d)).transpose(1, 2)


@library.define(
    "rotary_embedding_forward(Tensor x, Tensor cos, Tensor sin, Tensor? positions, "
    "bool tokens_first) -> Tensor y"
)
def rotary_embedding_forward(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, tokens_first: bool
) -> Tensor:
    """``x cos + rotate_half(x) sin`` of the first channels, as many as the tables have.

    A token takes the row of the tables that ``positions``, int64 ``[sequence]``, says, or its own.
    """
    return _tokens_like(x, tokens_first)


@library.define(
    "rotary_embedding_backward(Tensor dy, Tensor cos, Tensor sin, Tensor? positions, "
    "bool tokens_first) -> Tensor dx"
)
def rotary_embedding_backward(
    dy: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, tokens_first: bool
) -> Tensor:
    """The transposed rotation, which is the gradient of :func:`rotary_embedding_forward`."""
    return _tokens_like(dy, tokens_first)


@library.define(
    "rotary_embedding_2d_forward(Tensor x, Tensor cos_h, Tensor sin_h, Tensor cos_w, "
    "Tensor sin_w, int img_w) -> Tensor y"
)
def rotary_embedding_2d_forward(
    x: Tensor, cos_h: Tensor, sin_h: Tensor, cos_w: Tensor, sin_w: Tensor, img_w: int
) -> Tensor:
    """One half of the channels rotated by a token's row in an image, the other by its column."""
    return _tokens_like(x, False)


@library.define(
    "rotary_embedding_2d_backward(Tensor dy, Tensor cos_h, Tensor sin_h, Tensor cos_w, "
    "Tensor sin_w, int img_w) -> Tensor dx"
)
def rotary_embedding_2d_backward(
    dy: Tensor, cos_h: Tensor, sin_h: Tensor, cos_w: Tensor, sin_w: Tensor, img_w: int
) -> Tensor:
    """The transposed rotations."""
    return _tokens_like(dy, False)


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Tables ``[sequence, width]``; wide results."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    rotated, rest = wide[..., : cos.shape[-1]], wide[..., cos.shape[-1] :]
    turned = -_rotate_half(rotated * sin) if inverse else _rotate_half(rotated) * sin
    return torch.cat((rotated * cos + turned, rest), -1)


def _on_a_line(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    tokens_first: bool = True,
    inverse: bool = False,
) -> Tensor:
    own = [t[: x.shape[-2]] if positions is None else t[positions] for t in (cos, sin)]
    return _rotate(x, own[0], own[1], inverse).to(x.dtype)


def _on_a_plane(
    x: Tensor,
    cos_h: Tensor,
    sin_h: Tensor,
    cos_w: Tensor,
    sin_w: Tensor,
    img_w: int,
    inverse: bool = False,
) -> Tensor:
    token = torch.arange(x.shape[-2], device=x.device)
    row, column = token // img_w, token % img_w
    first, second = x.chunk(2, -1)
    first = _rotate(first, cos_h[row], sin_h[row], inverse)
    second = _rotate(second, cos_w[column], sin_w[column], inverse)
    return torch.cat((first, second), -1).to(x.dtype)


rotary_embedding = Formula(
    "rotary_embedding",
    rotary_embedding_forward,
    rotary_embedding_backward,
    _on_a_line,
    saves=("cos", "sin", "positions", "tokens_first"),
    grads=("x",),
    rows={"x": 2},
    shared=("cos", "sin", "positions"),
    plain_backward=lambda *given: _on_a_line(*given, inverse=True),
)
"""Rotate pairs of channels by the angles of their token. Arguments: those of
``rotary_embedding_forward``."""
rotary_embedding_2d = Formula(
    "rotary_embedding_2d",
    rotary_embedding_2d_forward,
    rotary_embedding_2d_backward,
    _on_a_plane,
    saves=("cos_h", "sin_h", "cos_w", "sin_w", "img_w"),
    grads=("x",),
    rows={"x": 2},
    shared=("cos_h", "sin_h", "cos_w", "sin_w"),
    plain_backward=lambda *given: _on_a_plane(*given, inverse=True),
)
"""The same for tokens of an image, which have a row and a column."""


def decompositions() -> dict:
    """All operators in ATen's, for ``ExportedProgram.run_decompositions``."""
    return {**rotary_embedding.decompositions(), **rotary_embedding_2d.decompositions()}
