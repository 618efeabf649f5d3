"""Attention with a mask and a bias that is learnt, such as AlphaFold's pair bias."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._shared.native.composed import Composed, plainly
from .._shared.native.half_matmul import is_slow
from .._shared.native.operands import autocast, check_floating, is_dtensor, statistics_dtype
from .._shared.native.transforms import is_transformed, kernels_serve
from ..multihead_attn.mask_softmax_dropout import mask_softmax_backward, mask_softmax_forward

__all__ = ["attention", "decompositions"]


def decompositions() -> dict[Any, Any]:
    """The operators in ATen's, for ``ExportedProgram.run_decompositions``."""
    from ..multihead_attn.weights import mask_softmax

    return mask_softmax.decompositions()


def attention(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    inf: float,
) -> Tensor:
    """``softmax(q k^T / sqrt(d) + (mask - 1) * inf + bias) v``; see ``mha.AttnTri``.

    Args:
        name: of the function that users call; messages begin with it.
    """
    query, key, value, bias = autocast(query, key, value, bias)
    _check(name, query, key, value)
    if not 0 <= inf < math.inf:
        raise ValueError(f"{name}: inf must be a finite number >= 0, such as 1e9, got {inf}.")
    scores = (*query.shape[:-1], key.shape[-2])
    mask, bias = (
        None if x is None else _checked(name, argument, x, scores, query)
        for argument, x in (("mask", mask), ("bias", bias))
    )
    hidden = None if mask is None else _hidden(mask, key.shape[-2], query.dtype, inf)
    bias = bias if bias is None else bias.to(query.dtype)
    return plainly(query, _attend, query, key, value, hidden, bias)


def _hidden(mask: Tensor, keys: int, dtype: torch.dtype, inf: float) -> Tensor:
    """What the mask adds to scores, in the dtype that these are computed in; every key has one."""
    mask = mask.detach().to(statistics_dtype(dtype)).contiguous()  # as our softmax reads it
    return (mask.expand(*mask.shape[:-1], keys) - 1) * inf


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, bias: Tensor | None) -> Tensor:
    if is_slow(q):
        wide = (t if t is None else t.float() for t in (q, k, v, hidden, bias))
        return _attend(*wide).to(q.dtype)
    # Of nothing, torch's attention has no gradients.
    serves = kernels_serve() and not is_dtensor(q) and q.numel() and k.numel()
    if serves and _sdpa_is_faster(q, k, v, bias):
        return _by_sdpa(q, k, v, hidden, bias)
    return _composed(None, q, k, v, hidden, bias)


# torch's own attention.


def _sdpa_is_faster(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """Whether torch's attention is faster: on a GPU where it has a kernel, on a CPU untrained.

    On a CPU without gradients it takes 0.4 to 0.9 of the time. With them it is slower where the
    bias gets one, and in bfloat16; in float32 without a bias it is faster
    (docs/contrib/openfold_triton.md has figures), but cannot be differentiated again.

    Never where layouts are not known yet: a batch of vmap hides its strides, and an exported
    program gets other tensors than it was made with. What is exported may be trained, too.
    """
    if is_transformed() or torch.compiler.is_exporting():
        return False
    given = (q, k, v) if bias is None else (q, k, v, bias)
    is_trained = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    if not q.is_cpu:
        return _has_kernel(q, k, v, is_trained)
    return not is_trained and q.dtype in (torch.float32, torch.bfloat16)


def _has_kernel(q: Tensor, k: Tensor, v: Tensor, is_trained: bool) -> bool:
    """Whether torch's attention is one kernel on a GPU. Otherwise it is torch's products, too.

    Its own products write scores in float32, and their backward obeys autocast; ours do neither.
    """
    # Kernels read rows of whole vectors, see _aligned.
    if q.dtype == torch.float64 or any(x.shape[-1] % _vector(x) for x in (q, v)):
        return False
    # Torch keeps what the backward reads only if one of these is trained. If the bias alone is, it
    # raises "LSE is not correctly aligned" (torch 2.11).
    return not is_trained or any(t.requires_grad for t in (q, k, v))


def _by_sdpa(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, bias: Tensor | None) -> Tensor:
    lead, sizes = q.shape[:-2], (q.shape[-2], k.shape[-2])
    batches, heads = math.prod(lead[:-1]), math.prod(lead[-1:])
    added = None
    if hidden is not None:
        # Half of the largest number: a row whose keys are all hidden stays finite with its bias.
        added = hidden.clamp(min=torch.finfo(q.dtype).min / 2).to(q.dtype)
    if bias is not None:
        if not q.is_cpu:  # AlphaFold's bias has heads last, and a sum keeps that layout
            bias = _aligned(bias.expand(*bias.shape[:-1], sizes[1]))
        added = bias if added is None else added + bias
    if added is not None:
        added = _of_lead(added, lead[:-1])
        if not q.is_cpu:
            added = _aligned(added)
        added = added.expand(batches, heads, *sizes)
    q, k, v = (x.reshape(batches, heads, *x.shape[-2:]) for x in (q, k, v))
    if not q.is_cpu:
        q, k, v = (_aligned(x, x.stride()[:-1]) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, added)
    # A kernel reads its gradient likewise. Compilers refuse hooks.
    if not q.is_cpu and y.requires_grad and not torch.compiler.is_compiling():
        y.register_hook(lambda dy: dy.clone() if _starts_within_a_vector(dy) else dy)
    return y.reshape(*lead, *y.shape[-2:])


def _aligned(x: Tensor, strides: Sequence[int] = ()) -> Tensor:
    """``x`` as torch's kernels for GPUs read it, by vectors of 16 bytes, or a contiguous copy.

    Torch 2.11 does not check this: for some strides it finds no kernel, and a start within a vector
    makes the GPU fail for the rest of the process.

    Args:
        x: what is read; where its rows are not adjacent elements, torch takes no kernel.
        strides: those to check. Torch itself pads what is added to scores.
    """
    vector = _vector(x)
    is_read = x.stride(-1) == 1 and not any(stride % vector for stride in strides)
    if is_read and not _starts_within_a_vector(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _starts_within_a_vector(x: Tensor) -> bool:
    """Whether ``x`` starts between vectors of its storage; compilers do not know where it does.

    Inductor copies such an argument itself, if the one it compiled for started at a vector.
    """
    return not torch.compiler.is_compiling() and x.storage_offset() % _vector(x) != 0


def _vector(x: Tensor) -> int:
    """Elements of ``x`` in 16 bytes."""
    return 16 // x.element_size()


# Torch's products, and our softmax.


def _forward(
    _: None, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    lead, sizes = q.shape[:-2], (q.shape[-2], k.shape[-2])
    scores = _product(_matrices(q), _matrices(k).transpose(1, 2), q.shape[-1] ** -0.5)
    scores = scores.view(*lead, *sizes)
    if bias is not None:  # vmap cannot write a batch of biases into scores that are none
        scores = scores + bias if is_transformed() else scores.add_(bias)
    rows, mask = _rows_of_mask(hidden, lead)
    weights = mask_softmax_forward(scores.view(*rows, *sizes), mask)
    y = torch.bmm(_matrices(weights), _matrices(v))
    return y.view(*lead, *y.shape[1:]), weights


def _backward(
    _: None, needs: Sequence[bool], dy: Tensor, saved: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    q, k, v, _, bias, weights = saved
    dq = dk = dv = dbias = None
    dy = _matrices(dy)
    if needs[2]:
        dv = torch.bmm(_matrices(weights).transpose(1, 2), dy).view(v.shape)
    if needs[0] or needs[1] or needs[4]:
        dweights = torch.bmm(dy, _matrices(v).transpose(1, 2))
        dscores = mask_softmax_backward(dweights.view(weights.shape), weights)
        scale, matrices = q.shape[-1] ** -0.5, _matrices(dscores)
        if needs[0]:
            dq = _product(matrices, _matrices(k), scale).view(q.shape)
        if needs[1]:
            dk = _product(matrices.transpose(1, 2), _matrices(q), scale).view(k.shape)
        if needs[4]:
            dbias = dscores.view(*q.shape[:-2], *dscores.shape[-2:]).sum_to_size(bias.shape)
    return dq, dk, dv, None, dbias


def _reference(
    _: None, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, bias: Tensor | None
) -> Tensor:
    wide = (x.to(torch.promote_types(q.dtype, torch.float32)) for x in (q, k, v))
    wide_q, wide_k, wide_v = wide
    scores = wide_q @ wide_k.transpose(-1, -2) * q.shape[-1] ** -0.5
    for added in (hidden, bias):
        scores = scores if added is None else scores + added
    return (torch.softmax(scores, -1) @ wide_v).to(q.dtype)


_composed = Composed("AttnTri", _forward, _backward, _reference)


def _matrices(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``scale * a @ b``, rounded once."""
    return torch.baddbmm(a.new_zeros(1, 1, 1), a, b, beta=0, alpha=scale)


def _of_lead(x: Tensor, lead: Sequence[int]) -> Tensor:
    """``x`` with the dimensions before its last three expanded to ``lead``, and made one."""
    x = x.reshape((1,) * (len(lead) + 3 - x.dim()) + tuple(x.shape))
    return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:])


def _rows_of_mask(hidden: Tensor | None, lead: torch.Size) -> tuple[list[int], Tensor | None]:
    """Leading dimensions of scores as batches and heads, and the mask of each batch."""
    batches, heads = math.prod(lead[:-1]), math.prod(lead[-1:])
    if hidden is None:
        return [batches, heads], None
    hidden = _of_lead(hidden, lead[:-1])
    if hidden.shape[1] == 1:
        return [batches, heads], hidden.squeeze(1)
    return [batches * heads, 1], hidden.flatten(0, 1)


def _check(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    for argument, x in (("query", q), ("key", k), ("value", v)):
        check_floating(name, argument, x)
        if (x.dtype, x.device) != (q.dtype, q.device):
            raise TypeError(
                f"{name}: {argument} is {x.dtype} on {x.device}, but query is {q.dtype} on "
                f"{q.device}; they must be alike."
            )
    fits = q.dim() >= 2 and q.dim() == k.dim() == v.dim() and 0 not in q.shape[-1:]
    if (
        not fits
        or not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
        or ((k.shape[-2], q.shape[-1]) != (v.shape[-2], k.shape[-1]))
    ):
        raise ValueError(
            f"{name}: query must be [..., heads, queries, d], key [..., heads, keys, d] and value "
            f"[..., heads, keys, d], got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}."
        )


def _checked(name: str, argument: str, x: Tensor, scores: Sequence[int], q: Tensor) -> Tensor:
    """Check what is added to scores; return it without leading ones that these do not have."""
    if argument == "bias":
        check_floating(name, argument, x)
    elif not isinstance(x, Tensor):
        raise TypeError(f"{name}: mask must be a tensor or None, got {type(x).__name__}.")
    elif x.requires_grad:
        raise ValueError(
            f"{name}: mask requires a gradient, but gets none. Pass its detach(), or add what is "
            "learnt to bias."
        )
    while x.dim() > len(scores) and x.shape[0] == 1:
        x = x.squeeze(0)
    pairs = zip(reversed(x.shape), reversed(scores), strict=False)
    if x.dim() > len(scores) or x.dim() == 0 or any(a not in (1, b) for a, b in pairs):
        raise ValueError(
            f"{name}: {argument} must be broadcastable to the scores, {list(scores)}, got "
            f"{list(x.shape)}."
        )
    if x.device != q.device:
        raise ValueError(f"{name}: {argument} is on {x.device}, but query on {q.device}; move one.")
    return x
