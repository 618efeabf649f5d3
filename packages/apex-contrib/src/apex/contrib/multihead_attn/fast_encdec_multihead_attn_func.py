"""Attention to another sequence with the usual scale, under Apex's names."""

from __future__ import annotations

from torch import Tensor

from .._shared.native.named_functions import NamedFunction
from .attention import Options
from .functions import ENCDEC, attend

__all__ = ["FastEncdecAttnFunc", "fast_encdec_attn_func"]


def fast_encdec_attn_func(
    use_time_mask: bool,
    is_training: bool,
    heads: int,
    inputs_q: Tensor,
    inputs_kv: Tensor,
    input_weights_q: Tensor,
    input_weights_kv: Tensor,
    output_weights: Tensor,
    pad_mask: Tensor | None,
    dropout_prob: float,
) -> Tensor:
    """Attention of ``[t, b, e]`` to ``[s, b, e]`` with the scale ``(e / heads) ** -0.5``.

    :func:`~apex.contrib.multihead_attn.encdec_multihead_attn_func.encdec_attn_func` describes the
    arguments; ``pad_mask`` is its ``mask``.
    """
    p = dropout_prob if is_training else 0.0
    options = Options(heads, None, pad_mask, use_time_mask, False, p)
    tensors = (inputs_q, inputs_kv, input_weights_q, input_weights_kv, output_weights)
    return attend(ENCDEC, "fast_encdec_attn_func", options, *tensors, None, None, None)[0]


class FastEncdecAttnFunc(NamedFunction, constants=("pad_mask",)):
    """Apex's class of :func:`fast_encdec_attn_func`."""

    apply = staticmethod(fast_encdec_attn_func)
