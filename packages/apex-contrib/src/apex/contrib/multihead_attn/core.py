"""Attention of projected queries, keys and values, with its own gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._shared.native.composed import Composed
from .._shared.native.operands import exact
from .._shared.native.plain import plainness
from . import mask_softmax_dropout as ops
from .weights import mask_softmax, softmax_dropout

__all__ = ["attend", "backward", "context_of", "forward", "parts"]

_Option = tuple[int, float, float]  # heads, scale, p


def attend(
    option: _Option, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``weights @ v`` with ``weights = dropout(softmax(scale * q @ k^T + mask))``, and the weights.

    Args:
        option: heads, scale, and the probability of dropout.
        q, k, v: ``[b * heads, sq, d]``; ``[b * heads, sk, d]``.
        mask: see :func:`~apex.contrib.multihead_attn.attention.kernel_mask`.
        seed: of dropout; not read if its probability is 0.

    Returns:
        ``[b * heads, sq, d]``, and ``[b, heads, sq, sk]``.
    """
    scores = exact(_scores(option, q, k))
    p = option[2]
    weights = softmax_dropout(scores, mask, seed, p)[0] if p else mask_softmax(scores, mask)
    return torch.bmm(weights.flatten(0, 1), v), weights


def _scores(option: _Option, q: Tensor, k: Tensor) -> Tensor:
    heads, scale, _ = option
    nothing = q.new_zeros(1, 1, 1)
    scores = torch.baddbmm(nothing, q, k.transpose(1, 2), beta=0, alpha=scale)
    return scores.view(q.shape[0] // heads, heads, *scores.shape[1:])


def parts(queries: Tensor, keys_values: Tensor | None) -> Sequence[Tensor]:
    """q, k and v of what :func:`context_of` takes."""
    return queries.unbind(0) if keys_values is None else (queries, *keys_values.unbind(0))


def _reference(
    option: _Option,
    queries: Tensor,
    keys_values: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
) -> Tensor:
    q, k, v = parts(queries, keys_values)
    return attend(option, q, k, v, mask, seed)[0]


def forward(
    option: _Option,
    queries: Tensor,
    keys_values: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    *corner: int,
) -> tuple[Tensor, ...]:
    """By the operators: :func:`context_of`'s result, and what :func:`backward` takes beside.

    ``corner`` is first, rows and columns of ``mask_softmax_dropout_forward``.
    """
    q, k, v = parts(queries, keys_values)
    scores, p = _scores(option, q, k), option[2]
    if p:
        dropped, softmax = ops.mask_softmax_dropout_forward(scores, mask, seed, p, *corner)
    else:
        dropped = softmax = ops.mask_softmax_forward(scores, mask)
    return torch.bmm(dropped.flatten(0, 1), v), softmax, dropped


def backward(
    option: _Option, needs: Sequence[bool], dy: Tensor, saved: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of queries, and of keys and values, by the operators.

    Those that follow each other in memory are written where they belong, with their scale: stacking
    and scaling them took as long as a product, at 128 tokens.
    """
    queries, keys_values, _, _, softmax, dropped = saved
    _, scale, p = option
    q, k, v = parts(queries, keys_values)
    d_dropped = torch.bmm(dy, v.transpose(1, 2)).view(dropped.shape)
    if p:
        ds = ops.mask_softmax_dropout_backward(d_dropped, None, softmax, dropped, p)
    else:
        ds = ops.mask_softmax_backward(d_dropped, softmax)
    ds, weights = ds.flatten(0, 1), dropped.flatten(0, 1)
    dqueries = queries.new_empty(queries.shape) if needs[0] else None
    dkeys = None
    if keys_values is None:
        dq, *of_keys = dqueries.unbind(0)
    else:
        dkeys = keys_values.new_empty(keys_values.shape) if needs[1] else None
        dq, of_keys = dqueries, [] if dkeys is None else dkeys.unbind(0)
    if dq is not None:
        torch.baddbmm(dq, ds, k, beta=0, alpha=scale, out=dq)
    if of_keys:
        dk, dv = of_keys
        torch.baddbmm(dk, ds.transpose(1, 2), q, beta=0, alpha=scale, out=dk)
        torch.bmm(weights.transpose(1, 2), dy, out=dv)
    return [dqueries, dkeys, None, None]


_composed = Composed("attention", forward, backward, _reference)


def context_of(option: _Option, *tensors: Any) -> Tensor:
    """:func:`attend`'s first result, ``[b * heads, sq, d]``.

    Args:
        option: as :func:`attend` takes it.
        *tensors: queries, keys and values ``[3, b * heads, s, d]`` and None; or queries
            ``[b * heads, sq, d]``, and keys and values ``[2, b * heads, sk, d]``; then mask and
            seed.
    """
    if answer := plainness(*tensors):
        return _composed.plain[answer](option, *tensors)
    if torch.compiler.is_compiling():  # compilers find their own passes in the formula
        return _reference(option, *tensors)
    return _composed(option, *tensors)
