"""The four functions of attention, checked: what Apex's function objects and modules call."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from . import attention
from .attention import Options, Results
from .checks import check_inputs, check_mask, check_parameters, check_probability

__all__ = ["encdec_attn", "encdec_attn_norm_add", "self_attn", "self_attn_norm_add"]


def _check_options(name: str, options: Options, x: Tensor, y: Tensor) -> None:
    check_probability(name, options.p)
    if options.mask is None:
        return
    argument = "attn_mask" if options.is_time_mask else "key_padding_mask"
    first = x.shape[0] if options.is_time_mask else x.shape[1]
    check_mask(name, argument, options.mask, (first, y.shape[0]), x.device, options.is_added)


def _check_self(name: str, options: Options, x: Tensor, *rest: Tensor | None) -> None:
    check_inputs(name, options.heads, inputs=x)
    w_in, w_out, b_in, b_out = rest
    check_parameters(
        name,
        x,
        input_weights=(w_in, 3),
        output_weights=(w_out, 1),
        input_biases=(b_in, -3),
        output_biases=(b_out, -1),
    )
    _check_options(name, options, x, x)


def _check_encdec(name: str, options: Options, x: Tensor, y: Tensor, *rest: Tensor | None) -> None:
    check_inputs(name, options.heads, inputs_q=x, inputs_kv=y)
    w_q, w_kv, w_out, b_q, b_kv, b_out = rest
    check_parameters(
        name,
        x,
        input_weights_q=(w_q, 1),
        input_weights_kv=(w_kv, 2),
        output_weights=(w_out, 1),
        input_biases_q=(b_q, -1),
        input_biases_kv=(b_kv, -2),
        output_biases=(b_out, -1),
    )
    _check_options(name, options, x, y)


def _check_norm(check, name: str, options: Options, x: Tensor, *rest: Tensor | None) -> None:
    gamma, beta, *others = rest
    check(name, options, x, *others)
    for argument, vector in (("gamma", gamma), ("beta", beta)):
        if not isinstance(vector, Tensor) or vector.dtype != x.dtype:
            got = vector.dtype if isinstance(vector, Tensor) else type(vector).__name__
            raise TypeError(f"{name}: {argument} must be {x.dtype}, as the inputs, got {got}.")
        if vector.shape != x.shape[-1:] or vector.device != x.device:
            raise ValueError(
                f"{name}: {argument} must have shape [{x.shape[-1]}] on {x.device}, got "
                f"{list(vector.shape)} on {vector.device}."
            )


def self_attn(name: str, options: Options, *tensors: Tensor | None) -> Results:
    """Outputs and averaged weights. Tensors: inputs, input and output weights, their biases."""
    return attention.call(attention.self_attention, _check_self, name, options, *tensors)


def encdec_attn(name: str, options: Options, *tensors: Tensor | None) -> Results:
    """The same. Tensors: inputs of queries and keys, their weights, output weights, biases."""
    return attention.call(attention.encdec_attention, _check_encdec, name, options, *tensors)


def self_attn_norm_add(name: str, options: Options, *tensors: Tensor | None) -> Results:
    """:func:`self_attn` of the normalized inputs, with dropout, added to them.

    Tensors: inputs, gamma, beta, and the others of :func:`self_attn`.
    """
    function = partial(attention.with_norm_and_residual, attention.self_attention)
    return attention.call(function, partial(_check_norm, _check_self), name, options, *tensors)


def encdec_attn_norm_add(name: str, options: Options, *tensors: Tensor | None) -> Results:
    """:func:`encdec_attn` with normalized queries, with dropout, added to ``inputs_q``.

    Tensors: ``inputs_q``, gamma, beta, and the others of :func:`encdec_attn`.
    """
    function = partial(attention.with_norm_and_residual, attention.encdec_attention)
    return attention.call(function, partial(_check_norm, _check_encdec), name, options, *tensors)
