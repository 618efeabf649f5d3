"""Attention composed of torch's matrix products and one operator: what all functions here call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._shared.native.operands import exact, is_dtensor, statistics_dtype
from .._shared.native.philox import draw_seed
from .._shared.native.plain import plainness
from .._shared.native.transforms import kernels_serve
from ..dense_epilogue.layer import dense
from .core import attend, context_of, parts
from .torch_attention import attend_without_weights, mask_kind, takes_sdpa
from .weights import dropout_rows, mask_softmax, softmax_dropout

__all__ = [
    "Options",
    "dropout",
    "encdec_attention",
    "kernel_mask",
    "masked_weights",
    "self_attention",
]

EPS = 1e-5  # of the layer norm


def masked_weights(scores: Tensor, mask: Tensor | None, p: float) -> Tensor:
    """Softmax of masked scores ``[b, heads, sq, sk]``, then dropout with probability ``p``.

    ``mask`` is one that :func:`kernel_mask` gave.
    """
    if p == 0:
        return mask_softmax(exact(scores), mask)
    return softmax_dropout(exact(scores), mask, _seed_of(scores), float(p))[0]


def dropout(x: Tensor, p: float) -> Tensor:
    """Dropout with probability ``p``, whose random numbers are those of :func:`masked_weights`."""
    return x if p == 0 else dropout_rows(exact(x), _seed_of(x), float(p))


def _seed_of(x: Tensor) -> Tensor:
    if type(x) is not Tensor and is_dtensor(x):
        raise TypeError(
            "attention: dropout of DTensors would drop the same elements of every shard; pass "
            "local tensors (to_local()), or no dropout."
        )
    return draw_seed(x.device)


def kernel_mask(
    mask: Tensor | None, is_time_mask: bool, is_added: bool, scores: Sequence[int], dtype: Any
) -> Tensor | None:
    """A mask as the operators take it: ``[b, 1, sk]``, or ``[b, sq, sk]``.

    Args:
        mask: ``[b, sk]``, or with ``is_time_mask`` ``[sq, sk]``: hides what is not 0, or with
            ``is_added`` is added.
        scores: ``b, heads, sq, sk``.
        dtype: of the scores.
    """
    if mask is None:
        return None
    if is_added:
        mask = mask.to(statistics_dtype(dtype))
    elif mask.dtype not in (torch.bool, torch.uint8):
        mask = mask != 0
    batch, _, queries, keys = scores
    if is_time_mask:
        return mask.contiguous().expand(batch, queries, keys)
    return mask.contiguous().unsqueeze(1)


def _split(projected: Tensor, parts: int, heads: int) -> Tensor:
    """``[t, b, heads * parts * d]`` as ``[parts, b * heads, t, d]``."""
    t, b, columns = projected.shape
    size = columns // (heads * parts)
    each = projected.view(t, b * heads, parts, size).permute(2, 1, 0, 3)
    if projected.is_cpu and projected.dtype.itemsize == 2:
        each = each.contiguous()  # products of strided 16-bit matrices take twice the time
    return each


def _merge(context: Tensor, batch: int, heads: int) -> Tensor:
    """``[b * heads, t, d]`` as ``[t, b, heads * d]``."""
    _, t, size = context.shape
    return context.transpose(0, 1).reshape(t, batch, heads * size)


@dataclass(frozen=True)
class Options:
    """What a call of attention is asked for, beside its tensors.

    Args:
        heads, scale: of attention; the usual scale, ``d ** -0.5``, where it is None.
        mask: see :func:`kernel_mask`, as are ``is_time_mask`` and ``is_added``.
        p: probability of dropout, 0 outside training.
        needs_weights: return the weights, averaged over heads.
    """

    heads: int
    scale: float | None
    mask: Tensor | None
    is_time_mask: bool
    is_added: bool
    p: float
    needs_weights: bool = False


Results = tuple[Tensor, Tensor | None]


def _finish(
    queries: Tensor,
    keys_values: Tensor | None,
    batch: int,
    options: Options,
    w: Tensor,
    b: Tensor | None,
) -> Results:
    """Of projected tensors, as :func:`~apex.contrib.multihead_attn.core.context_of` has them."""
    given, heads = (options.mask, options.is_time_mask, options.is_added), options.heads
    keys = queries if keys_values is None else keys_values
    scale = queries.shape[-1] ** -0.5 if options.scale is None else options.scale
    is_composed = options.p or options.needs_weights  # as _takes_sdpa() finds, too
    if not is_composed and _takes_sdpa(queries, keys, options):
        context = attend_without_weights(*parts(queries, keys_values), heads, scale, *given)
        return _linear(_merge(context, batch, heads), w, b), None
    mask = None
    if options.mask is not None:
        sizes = batch, heads, queries.shape[-2], keys.shape[-2]
        mask = kernel_mask(*given, sizes, queries.dtype)
    seed = _seed_of(queries) if options.p else None
    option = heads, scale, float(options.p)
    if options.needs_weights:
        context, weights = attend(option, *parts(queries, keys_values), mask, seed)
        return _linear(_merge(context, batch, heads), w, b), weights.mean(1)
    context = context_of(option, queries, keys_values, mask, seed)
    return _linear(_merge(context, batch, heads), w, b), None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A dense layer whose backward no autocast changes."""
    if answer := plainness(x, weight, bias):
        return dense.plain[answer](None, x, weight, bias)
    if torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    return dense(None, x, weight, bias)


def _takes_sdpa(q: Tensor, k: Tensor, options: Options) -> bool:
    kind = mask_kind(options.mask, options.is_time_mask, options.is_added, q.dtype)
    if not takes_sdpa(q.device.type, options.p, kind, options.needs_weights):
        return False
    return q.numel() > 0 and k.numel() > 0 and not is_dtensor(q) and kernels_serve()


def self_attention(
    options: Options,
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
) -> Results:
    """Outputs of inputs ``[t, b, e]``, and averaged weights ``[b, t, t]`` or None."""
    projected = _split(_linear(x, w_in, b_in), 3, options.heads)
    return _finish(projected, None, x.shape[1], options, w_out, b_out)


def encdec_attention(
    options: Options,
    x: Tensor,
    y: Tensor,
    w_q: Tensor,
    w_kv: Tensor,
    w_out: Tensor,
    b_q: Tensor | None,
    b_kv: Tensor | None,
    b_out: Tensor | None,
) -> Results:
    """The same: queries from ``x`` ``[t, b, e]``, keys and values from ``y`` ``[s, b, e]``."""
    queries = _split(_linear(x, w_q, b_q), 1, options.heads)[0]
    keys_values = _split(_linear(y, w_kv, b_kv), 2, options.heads)
    return _finish(queries, keys_values, x.shape[1], options, w_out, b_out)
