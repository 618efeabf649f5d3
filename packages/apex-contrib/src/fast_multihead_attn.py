"""Apex's extension module of multihead attention: its positional signatures over this wheel's ops.

Importable only where the kernels can run, because callers take the import as that answer. Any
floating-point dtype is taken. In the signatures, ``t`` and ``s`` are the queries and keys of a
sequence, ``b`` the batch, ``e`` the features and ``n = b * heads``. ``pad_mask`` is ``[b, s]``, or
with ``use_time_mask`` ``[t, s]``, and counts only with ``use_mask``. Masks of dropout are uint8, 1
where something is kept; without training they are ones.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from apex.contrib._ops import library
from apex.contrib._shared.native.half_matmul import needs_float32
from apex.contrib._shared.native.philox import draw_seed
from apex.contrib.layer_norm.fast_layer_norm import ops as _norm
from apex.contrib.multihead_attn import mask_softmax_dropout as _ops
from apex.contrib.multihead_attn.attention import EPS, kernel_mask

library.require_for_import(__name__, "mask_softmax_dropout", "fast_layer_norm")

__all__ = [
    "additive_mask_softmax_dropout_backward",
    "additive_mask_softmax_dropout_forward",
    "encdec_multihead_attn_backward",
    "encdec_multihead_attn_forward",
    "encdec_multihead_attn_norm_add_backward",
    "encdec_multihead_attn_norm_add_forward",
    "mask_softmax_dropout_backward",
    "mask_softmax_dropout_forward",
    "self_attn_backward",
    "self_attn_bias_additive_mask_backward",
    "self_attn_bias_additive_mask_forward",
    "self_attn_bias_backward",
    "self_attn_bias_forward",
    "self_attn_forward",
    "self_attn_norm_add_backward",
    "self_attn_norm_add_forward",
]

_Tensors = list[Tensor]


def _product(a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """``scale * a @ b`` of matrices or batches of them."""
    multiply = torch.bmm if a.dim() == 3 else torch.mm
    if needs_float32(a, b):
        return multiply(a.float(), b.float()).mul_(scale).to(a.dtype)
    if a.dim() == 3 and scale != 1:
        return torch.baddbmm(a.new_zeros(1, 1, 1), a, b, beta=0, alpha=scale)
    return multiply(a, b)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if needs_float32(x, weight):
        wide_bias = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)
    return F.linear(x, weight, bias)


def _weight_grads(dy: Tensor, x: Tensor, columns: int) -> Tensor:
    return _product(dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, columns))


def _split(lin: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """``[t, b, heads * parts * d]`` as ``parts`` of ``[n, t, d]``."""
    t, b, columns = lin.shape
    each = lin.reshape(t, b * heads, parts, columns // (heads * parts))
    return each.permute(2, 1, 0, 3).unbind(0)


def _join(parts: list[Tensor], batch: int) -> Tensor:
    """The inverse of :func:`_split`."""
    n, t, size = parts[0].shape
    columns = n // max(batch, 1) * len(parts) * size
    return torch.stack(parts).permute(2, 1, 0, 3).reshape(t, batch, columns)


def _dropped(
    scores: Tensor, heads: int, mask: Tensor | None, is_training: bool, p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``[n, t, s]`` each: after dropout, the mask of what is kept, and before dropout."""
    shape = scores.shape
    by_head = scores.contiguous().view(shape[0] // heads, heads, *shape[1:])
    if not is_training or p == 0:
        softmax = _ops.mask_softmax_forward(by_head, mask).view(shape)
        return softmax, torch.ones_like(softmax, dtype=torch.uint8), softmax
    seed = draw_seed(scores.device)
    dropped, softmax = _ops.mask_softmax_dropout_forward(by_head, mask, seed, p)
    return dropped.view(shape), _kept(shape, scores, seed, p), softmax.view(shape)


def _kept(shape: torch.Size, like: Tensor, seed: Tensor, p: float) -> Tensor:
    """What dropout with this seed keeps of rows of ``shape``."""
    ones = torch.ones(shape, dtype=torch.float32, device=like.device)
    return (_ops.seeded_dropout(ones, seed, p) != 0).to(torch.uint8)


def _mask(
    use_mask: bool, use_time_mask: bool, is_added: bool, mask: Tensor | None, heads: int, x: Tensor
) -> Tensor | None:
    """The mask of scores ``x`` ``[n, t, s]``, as the operators take it."""
    scores = (x.shape[0] // heads, heads, *x.shape[1:])
    return kernel_mask(mask, use_time_mask, is_added, scores, x.dtype) if use_mask else None


def _attend(
    options: tuple, q: Tensor, k: Tensor, v: Tensor, pad_mask: Tensor | None, is_added: bool = False
) -> _Tensors:
    """Scores, softmax, dropped, mask of dropout; and context ``[t, n, d]``."""
    use_mask, use_time_mask, is_training, heads, p = options
    scores = _product(q, k.transpose(1, 2), q.shape[2] ** -0.5)
    mask = _mask(use_mask, use_time_mask, is_added, pad_mask, heads, scores)
    dropped, kept, softmax = _dropped(scores, heads, mask, is_training, p)
    context = _product(dropped, v).transpose(0, 1).contiguous()
    return [scores, softmax, dropped, kept, context]


def _attend_backward(
    d_context: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...], p: float
) -> _Tensors:
    """Gradients of q, k and v; ``saved``: dropped, softmax, mask of dropout."""
    dropped, softmax, kept = saved
    dy, scale = d_context.transpose(0, 1), q.shape[2] ** -0.5
    d_dropped = _product(dy, v.transpose(1, 2))
    d_scores = _ops.mask_softmax_dropout_backward(d_dropped, None, softmax, kept.contiguous(), p)
    return [
        _product(d_scores, k, scale),
        _product(d_scores.transpose(1, 2), q, scale),
        _product(dropped.transpose(1, 2), dy),
    ]


def _output_backward(
    output_grads: Tensor, matmul2_results: Tensor, output_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the context ``[t, n, d]`` and of the output weights."""
    d_context = _linear(output_grads, output_weights.t()).view(matmul2_results.shape)
    return d_context, _weight_grads(output_grads, matmul2_results, output_weights.shape[1])


def _self_forward(
    options: tuple,
    inputs: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    pad_mask: Tensor | None,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    is_added: bool = False,
) -> _Tensors:
    """Projections, then those of :func:`_attend`, then outputs."""
    lin = _linear(inputs, w_in, biases[0])
    results = _attend(options, *_split(lin, 3, options[3]), pad_mask, is_added)
    return [lin, *results, _linear(results[-1].view(inputs.shape), w_out, biases[1])]


def _self_backward(
    heads: int,
    output_grads: Tensor,
    matmul2_results: Tensor,
    saved: tuple[Tensor, ...],
    lin: Tensor,
    inputs: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    p: float,
) -> tuple[_Tensors, Tensor]:
    """Gradients of inputs and of both weights; and of the projections."""
    d_context, d_out = _output_backward(output_grads, matmul2_results, w_out)
    parts = _attend_backward(d_context, *_split(lin, 3, heads), saved, p)
    d_lin = _join(parts, inputs.shape[1])
    return [_linear(d_lin, w_in.t()), _weight_grads(d_lin, inputs, w_in.shape[1]), d_out], d_lin


def _encdec_forward(
    options: tuple,
    inputs_q: Tensor,
    inputs_kv: Tensor,
    w_q: Tensor,
    w_kv: Tensor,
    w_out: Tensor,
    pad_mask: Tensor | None,
) -> _Tensors:
    lin_q, lin_kv = _linear(inputs_q, w_q), _linear(inputs_kv, w_kv)
    heads = options[3]
    (q,), (k, v) = _split(lin_q, 1, heads), _split(lin_kv, 2, heads)
    results = _attend(options, q, k, v, pad_mask)
    return [lin_q, lin_kv, *results, _linear(results[-1].view(inputs_q.shape), w_out)]


def _encdec_backward(
    heads: int,
    output_grads: Tensor,
    matmul2_results: Tensor,
    saved: tuple[Tensor, ...],
    lins: tuple[Tensor, Tensor],
    inputs: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor],
    p: float,
) -> _Tensors:
    """Gradients of both inputs and of the three weights."""
    (w_q, w_kv, w_out), (x, y) = weights, inputs
    d_context, d_out = _output_backward(output_grads, matmul2_results, w_out)
    (q,), (k, v) = _split(lins[0], 1, heads), _split(lins[1], 2, heads)
    dq, dk, dv = _attend_backward(d_context, q, k, v, saved, p)
    d_q, d_kv = _join([dq], x.shape[1]), _join([dk, dv], x.shape[1])
    e = w_q.shape[1]
    return [
        _linear(d_q, w_q.t()),
        _linear(d_kv, w_kv.t()),
        _weight_grads(d_q, x, e),
        _weight_grads(d_kv, y, e),
        d_out,
    ]


def _normalized(inputs: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _norm.fast_layer_norm_forward(inputs.contiguous(), gamma, beta, EPS)


def _added(inputs: Tensor, y: Tensor, is_training: bool, p: float) -> _Tensors:
    """The mask of dropout, and ``inputs + dropout(y)``."""
    if not is_training or p == 0:
        return [torch.ones_like(y, dtype=torch.uint8), inputs + y]
    seed = draw_seed(y.device)
    return [_kept(y.shape, y, seed, p), inputs + _ops.seeded_dropout(y.contiguous(), seed, p)]


def _norm_backward(
    d_normalized: Tensor, output_grads: Tensor, inputs: Tensor, gamma: Tensor, stats: tuple
) -> _Tensors:
    """Gradients of inputs, with that of the residual, of gamma and of beta."""
    given = (d_normalized.contiguous(), inputs.contiguous(), gamma, *stats)
    dx, d_gamma, d_beta = _norm.fast_layer_norm_backward(*given, True)
    return [dx + output_grads, d_gamma, d_beta]


def _through_dropout(output_grads: Tensor, mask: Tensor, p: float) -> Tensor:
    return output_grads * mask * (1 / (1 - p) if p < 1 else 0.0)


@torch.no_grad()
def additive_mask_softmax_dropout_forward(
    use_mask, is_training, heads, input, pad_mask, dropout_prob
) -> _Tensors:
    """Softmax of scores ``[n, t, s]`` plus a mask: after dropout, mask of dropout, before it."""
    mask = _mask(use_mask, False, True, pad_mask, heads, input)
    return list(_dropped(input, heads, mask, is_training, dropout_prob))


@torch.no_grad()
def mask_softmax_dropout_forward(
    use_mask, is_training, heads, input, pad_mask, dropout_prob
) -> _Tensors:
    """The same with a mask that hides keys where it is not 0."""
    mask = _mask(use_mask, False, False, pad_mask, heads, input)
    return list(_dropped(input, heads, mask, is_training, dropout_prob))


@torch.no_grad()
def additive_mask_softmax_dropout_backward(
    use_mask, heads, output_grads, softmax_results, dropout_mask, dropout_prob
) -> Tensor:
    """Gradient of the scores, a tensor of its own."""
    saved = (softmax_results.contiguous(), dropout_mask.contiguous())
    return _ops.mask_softmax_dropout_backward(output_grads, None, *saved, dropout_prob)


@torch.no_grad()
def mask_softmax_dropout_backward(
    use_mask, heads, output_grads, softmax_results, dropout_mask, padding_mask, dropout_prob
) -> Tensor:
    """The same; ``padding_mask`` says nothing that ``softmax_results`` does not."""
    given = (use_mask, heads, output_grads, softmax_results, dropout_mask, dropout_prob)
    return additive_mask_softmax_dropout_backward(*given)


@torch.no_grad()
def self_attn_forward(
    use_mask, use_time_mask, is_training, heads, inputs, w_in, w_out, pad_mask, dropout_prob
) -> _Tensors:
    """Projections, softmax, dropped, mask of dropout, context, outputs."""
    options = (use_mask, use_time_mask, is_training, heads, dropout_prob)
    lin, _, *results = _self_forward(options, inputs, w_in, w_out, pad_mask)
    return [lin, *results]


@torch.no_grad()
def self_attn_backward(
    heads, output_grads, mm2, dropped, softmax, lin, inputs, w_in, w_out, dropout_mask, p
) -> _Tensors:
    """Gradients of inputs, input weights and output weights."""
    saved = (dropped, softmax, dropout_mask)
    return _self_backward(heads, output_grads, mm2, saved, lin, inputs, w_in, w_out, p)[0]


@torch.no_grad()
def self_attn_bias_forward(
    use_mask, use_time_mask, is_training, heads, inputs, w_in, w_out, b_in, b_out, pad_mask, p
) -> _Tensors:
    """As :func:`self_attn_forward`, with biases."""
    options = (use_mask, use_time_mask, is_training, heads, p)
    lin, _, *results = _self_forward(options, inputs, w_in, w_out, pad_mask, (b_in, b_out))
    return [lin, *results]


@torch.no_grad()
def self_attn_bias_backward(
    heads, output_grads, mm2, dropped, softmax, lin, inputs, w_in, w_out, dropout_mask, p
) -> _Tensors:
    """As :func:`self_attn_backward`, then gradients of the input and output biases."""
    saved = (dropped, softmax, dropout_mask)
    grads, d_lin = _self_backward(heads, output_grads, mm2, saved, lin, inputs, w_in, w_out, p)
    return [*grads, d_lin.sum((0, 1)), output_grads.sum((0, 1))]


@torch.no_grad()
def self_attn_bias_additive_mask_forward(
    use_mask, use_time_mask, is_training, heads, inputs, w_in, w_out, b_in, b_out, pad_mask, p
) -> _Tensors:
    """As :func:`self_attn_bias_forward` with a mask that is added; scores instead of softmax."""
    options = (use_mask, use_time_mask, is_training, heads, p)
    given = (options, inputs, w_in, w_out, pad_mask, (b_in, b_out), True)
    lin, scores, _, *results = _self_forward(*given)
    return [lin, scores, *results]


@torch.no_grad()
def self_attn_bias_additive_mask_backward(
    heads, output_grads, mm2, dropped, scores, pad_mask, lin, inputs, w_in, w_out, dropout_mask, p
) -> _Tensors:
    """As :func:`self_attn_bias_backward`; softmax is computed again."""
    mask = _mask(pad_mask is not None, False, True, pad_mask, heads, scores)
    softmax = _dropped(scores, heads, mask, False, p)[2]
    saved = (dropped, softmax, dropout_mask)
    grads, d_lin = _self_backward(heads, output_grads, mm2, saved, lin, inputs, w_in, w_out, p)
    return [*grads, d_lin.sum((0, 1)), output_grads.sum((0, 1))]


@torch.no_grad()
def self_attn_norm_add_forward(
    use_mask, use_time_mask, is_training, heads, inputs, gamma, beta, w_in, w_out, pad_mask, p
) -> _Tensors:
    """Layer norm, mean, 1 / deviation, those of :func:`self_attn_forward`, mask of the residual's
    dropout, outputs."""
    options = (use_mask, use_time_mask, is_training, heads, p)
    norm = _normalized(inputs, gamma, beta)
    lin, _, *results, y = _self_forward(options, norm[0], w_in, w_out, pad_mask)
    return [*norm, lin, *results, *_added(inputs, y, is_training, p)]


@torch.no_grad()
def self_attn_norm_add_backward(
    heads,
    output_grads,
    mm2,
    dropped,
    softmax,
    lin,
    ln_out,
    ln_mean,
    ln_invvar,
    inputs,
    gamma,
    beta,
    w_in,
    w_out,
    dropout_mask,
    dropout_add_mask,
    p,
) -> _Tensors:
    """Gradients of inputs, gamma, beta, input weights and output weights."""
    dy, saved = (
        _through_dropout(output_grads, dropout_add_mask, p),
        (dropped, softmax, dropout_mask),
    )
    (dx, *of_weights), _ = _self_backward(heads, dy, mm2, saved, lin, ln_out, w_in, w_out, p)
    return [*_norm_backward(dx, output_grads, inputs, gamma, (ln_mean, ln_invvar)), *of_weights]


@torch.no_grad()
def encdec_multihead_attn_forward(
    use_mask, use_time_mask, is_training, heads, inputs_q, inputs_kv, w_q, w_kv, w_out, pad_mask, p
) -> _Tensors:
    """Projections of queries, and of keys and values, then as :func:`self_attn_forward`."""
    options = (use_mask, use_time_mask, is_training, heads, p)
    given = (inputs_q, inputs_kv, w_q, w_kv, w_out, pad_mask)
    lin_q, lin_kv, _, *results = _encdec_forward(options, *given)
    return [lin_q, lin_kv, *results]


@torch.no_grad()
def encdec_multihead_attn_backward(
    heads,
    output_grads,
    mm2,
    dropped,
    softmax,
    lin_q,
    lin_kv,
    inputs_q,
    inputs_kv,
    w_q,
    w_kv,
    w_out,
    dropout_mask,
    p,
) -> _Tensors:
    """Gradients of both inputs, of their weights, and of the output weights."""
    saved, inputs = (dropped, softmax, dropout_mask), (inputs_q, inputs_kv)
    given = (saved, (lin_q, lin_kv), inputs, (w_q, w_kv, w_out), p)
    return _encdec_backward(heads, output_grads, mm2, *given)


@torch.no_grad()
def encdec_multihead_attn_norm_add_forward(
    use_mask,
    use_time_mask,
    is_training,
    heads,
    inputs_q,
    inputs_kv,
    gamma,
    beta,
    w_q,
    w_kv,
    w_out,
    pad_mask,
    p,
) -> _Tensors:
    """Layer norm of the queries, mean, 1 / deviation, those of
    :func:`encdec_multihead_attn_forward`, mask of the residual's dropout, outputs."""
    options = (use_mask, use_time_mask, is_training, heads, p)
    norm = _normalized(inputs_q, gamma, beta)
    given = (norm[0], inputs_kv, w_q, w_kv, w_out, pad_mask)
    lin_q, lin_kv, _, *results, y = _encdec_forward(options, *given)
    return [*norm, lin_q, lin_kv, *results, *_added(inputs_q, y, is_training, p)]


@torch.no_grad()
def encdec_multihead_attn_norm_add_backward(
    heads,
    output_grads,
    mm2,
    dropped,
    softmax,
    lin_q,
    lin_kv,
    ln_out,
    ln_mean,
    ln_invvar,
    inputs_q,
    inputs_kv,
    gamma,
    beta,
    w_q,
    w_kv,
    w_out,
    dropout_mask,
    dropout_add_mask,
    p,
) -> _Tensors:
    """Gradients of both inputs, gamma, beta, the inputs' weights and the output weights."""
    dy, saved = (
        _through_dropout(output_grads, dropout_add_mask, p),
        (dropped, softmax, dropout_mask),
    )
    given = (saved, (lin_q, lin_kv), (ln_out, inputs_kv), (w_q, w_kv, w_out), p)
    dx, d_kv, *of_weights = _encdec_backward(heads, dy, mm2, *given)
    of_norm = _norm_backward(dx, output_grads, inputs_q, gamma, (ln_mean, ln_invvar))
    return [of_norm[0], d_kv, *of_norm[1:], *of_weights]
