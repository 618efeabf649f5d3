"""Attention of one sequence to another as a function, under Apex's names."""

from __future__ import annotations

from torch import Tensor

from .._shared.native.named_functions import NamedFunction
from .attention import Options
from .functions import ENCDEC, attend

__all__ = ["EncdecAttnFunc", "encdec_attn_func"]


def encdec_attn_func(
    use_time_mask: bool,
    is_training: bool,
    heads: int,
    scale: float,
    inputs_q: Tensor,
    inputs_kv: Tensor,
    input_weights_q: Tensor,
    input_weights_kv: Tensor,
    output_weights: Tensor,
    input_biases_q: Tensor | None,
    input_biases_kv: Tensor | None,
    output_biases: Tensor | None,
    mask: Tensor | None,
    dropout_prob: float,
) -> Tensor:
    """Multihead attention of queries ``[t, b, e]`` to keys and values ``[s, b, e]``.

    As :func:`~apex.contrib.multihead_attn.self_multihead_attn_func.self_attn_func`, but for

    Args:
        inputs_q, inputs_kv: what queries, and what keys and values are projected from.
        input_weights_q: ``[e, e]``.
        input_weights_kv: ``[2e, e]``, laid out as ``[heads, 2, e / heads, e]``.
        input_biases_q, input_biases_kv: ``[e]`` and ``[2e]``, or None.
        mask: ``[b, s]``, or with ``use_time_mask`` ``[t, s]``: hides a key where it is not 0.

    Returns:
        ``[t, b, e]``.
    """
    p = dropout_prob if is_training else 0.0
    options = Options(heads, scale, mask, use_time_mask, False, p)
    weights = (input_weights_q, input_weights_kv, output_weights)
    biases = (input_biases_q, input_biases_kv, output_biases)
    return attend(ENCDEC, "encdec_attn_func", options, inputs_q, inputs_kv, *weights, *biases)[0]


class EncdecAttnFunc(NamedFunction, constants=("mask",)):
    """Apex's class of :func:`encdec_attn_func`."""

    apply = staticmethod(encdec_attn_func)
