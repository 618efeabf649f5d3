"""The four kinds of attention, checked: what Apex's function objects and modules call."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .._shared.native.composed import plainly
from .._shared.native.half_matmul import needs_float32
from .._shared.native.operands import autocast
from .._shared.native.plain import plainness
from ..layer_norm.layer_norm import FastLayerNormFN
from .attention import EPS, Options, Results, dropout, encdec_attention, self_attention
from .checks import check_inputs, check_mask, check_norm, check_parameters, check_probability

__all__ = ["ENCDEC", "ENCDEC_NORM_ADD", "SELF", "SELF_NORM_ADD", "attend"]


class Kind(NamedTuple):
    """What is called, and the tensors that it takes.

    Args:
        function: ``(options, *inputs, *parameters) -> results``.
        inputs: what messages call them.
        parameters: the same, with their rows as a multiple of embed_dim; negative: a bias.
        has_norm: whether ``x + dropout(function(layer_norm(x), ...))`` is asked for.
    """

    function: Callable[..., Results]
    inputs: tuple[str, ...]
    parameters: dict[str, int]
    has_norm: bool = False


SELF = Kind(
    self_attention,
    ("inputs",),
    {"input_weights": 3, "output_weights": 1, "input_biases": -3, "output_biases": -1},
)
"""Attention of an input to itself."""
ENCDEC = Kind(
    encdec_attention,
    ("inputs_q", "inputs_kv"),
    {
        "input_weights_q": 1,
        "input_weights_kv": 2,
        "output_weights": 1,
        "input_biases_q": -1,
        "input_biases_kv": -2,
        "output_biases": -1,
    },
)
"""Attention of one input, the queries, to another."""
SELF_NORM_ADD = SELF._replace(has_norm=True)
"""``SELF`` of a layer norm, dropped out and added to the input."""
ENCDEC_NORM_ADD = ENCDEC._replace(has_norm=True)
"""``ENCDEC`` of a layer norm of the queries, dropped out and added to these."""


def attend(kind: Kind, name: str, options: Options, *tensors: Tensor | None) -> Results:
    """Outputs and averaged weights, computed in the dtype that the device multiplies.

    Autocast is off inside. Under autocast all tensors are cast to its dtype, and checked after. On
    CPUs without products of that dtype the function computes in float32, and its results are
    rounded.

    Args:
        kind: one of those above.
        name: the caller's, for messages.
        tensors: the first input; of a kind with a norm, gamma and beta; another input, if there is
            one; the parameters.
    """
    if plainness(*tensors):
        _check(kind, name, options, *tensors)
        return _computed(kind, options, *tensors)
    tensors = autocast(*tensors)
    _check(kind, name, options, *tensors)
    return plainly(tensors[0], _computed, kind, options, *tensors)


def _check(kind: Kind, name: str, options: Options, x: Tensor, *rest: Tensor | None) -> None:
    norm, rest = (rest[:2], rest[2:]) if kind.has_norm else ((), rest)
    keys, rest = (rest[:1], rest[1:]) if kind.inputs[1:] else ((), rest)
    inputs = x, *keys
    check_inputs(name, options.heads, dict(zip(kind.inputs, inputs, strict=True)))
    check_parameters(name, x, kind.parameters, rest)
    check_probability(name, options.p)
    if options.mask is not None:
        argument = "attn_mask" if options.is_time_mask else "key_padding_mask"
        shape = x.shape[0] if options.is_time_mask else x.shape[1], inputs[-1].shape[0]
        check_mask(name, argument, options.mask, shape, x.device, options.is_added)
    if norm:
        check_norm(name, x, *norm)


def _computed(kind: Kind, options: Options, x: Tensor, *rest: Tensor | None) -> Results:
    if needs_float32(x, *rest):
        wide = [t if t is None else t.float() for t in (x, *rest)]
        output, weights = _normed(kind, options, *wide)
        return output.to(x.dtype), weights if weights is None else weights.to(x.dtype)
    return _normed(kind, options, x, *rest)


def _normed(kind: Kind, options: Options, x: Tensor, *rest: Tensor | None) -> Results:
    if not kind.has_norm:
        return kind.function(options, x, *rest)
    gamma, beta, *others = rest
    y, weights = kind.function(options, FastLayerNormFN.apply(x, gamma, beta, EPS), *others)
    return x + dropout(y, options.p), weights
