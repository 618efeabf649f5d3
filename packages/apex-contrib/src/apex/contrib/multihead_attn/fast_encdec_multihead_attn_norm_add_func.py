"""Attention to another sequence, with a layer norm and a residual, under Apex's names."""

from __future__ import annotations

from torch import Tensor

from .._shared.native.named_functions import NamedFunction
from .attention import Options
from .functions import ENCDEC_NORM_ADD, attend

__all__ = ["FastEncdecAttnNormAddFunc", "fast_encdec_attn_norm_add_func"]


def fast_encdec_attn_norm_add_func(
    use_time_mask: bool,
    is_training: bool,
    heads: int,
    inputs_q: Tensor,
    inputs_kv: Tensor,
    lyr_nrm_gamma_weights: Tensor,
    lyr_nrm_beta_weights: Tensor,
    input_weights_q: Tensor,
    input_weights_kv: Tensor,
    output_weights: Tensor,
    pad_mask: Tensor | None,
    dropout_prob: float,
) -> Tensor:
    """``inputs_q + dropout(attention(layer_norm(inputs_q), inputs_kv))``.

    Arguments are those of
    :func:`~apex.contrib.multihead_attn.fast_encdec_multihead_attn_func.fast_encdec_attn_func`, and
    of the layer norm as in
    :func:`~apex.contrib.multihead_attn.fast_self_multihead_attn_norm_add_func.fast_self_attn_norm_add_func`.
    """
    p = dropout_prob if is_training else 0.0
    options = Options(heads, None, pad_mask, use_time_mask, False, p)
    norm = (lyr_nrm_gamma_weights, lyr_nrm_beta_weights)
    weights = (input_weights_q, input_weights_kv, output_weights)
    tensors = (inputs_q, *norm, inputs_kv, *weights)
    name = "fast_encdec_attn_norm_add_func"
    return attend(ENCDEC_NORM_ADD, name, options, *tensors, None, None, None)[0]


class FastEncdecAttnNormAddFunc(NamedFunction, constants=("pad_mask",)):
    """Apex's class of :func:`fast_encdec_attn_norm_add_func`."""

    apply = staticmethod(fast_encdec_attn_norm_add_func)
