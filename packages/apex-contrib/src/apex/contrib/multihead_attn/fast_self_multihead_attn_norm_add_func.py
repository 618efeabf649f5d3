"""Self attention between a layer norm and a residual, under Apex's names."""

from __future__ import annotations

from torch import Tensor

from .._shared.native.named_functions import NamedFunction
from .attention import Options
from .functions import SELF_NORM_ADD, attend

__all__ = ["FastSelfAttnNormAddFunc", "fast_self_attn_norm_add_func"]


def fast_self_attn_norm_add_func(
    use_time_mask: bool,
    is_training: bool,
    heads: int,
    inputs: Tensor,
    lyr_nrm_gamma_weights: Tensor,
    lyr_nrm_beta_weights: Tensor,
    input_weights: Tensor,
    output_weights: Tensor,
    pad_mask: Tensor | None,
    dropout_prob: float,
) -> Tensor:
    """``inputs + dropout(attention(layer_norm(inputs)))``, for ``[t, b, e]``.

    ``lyr_nrm_gamma_weights`` and ``lyr_nrm_beta_weights`` are weight and bias ``[e]`` of the layer
    norm, whose eps is 1e-5. Both dropouts have the probability ``dropout_prob``. The other
    arguments are those of
    :func:`~apex.contrib.multihead_attn.fast_self_multihead_attn_func.fast_self_attn_func`.
    """
    p = dropout_prob if is_training else 0.0
    options = Options(heads, None, pad_mask, use_time_mask, False, p)
    tensors = (lyr_nrm_gamma_weights, lyr_nrm_beta_weights, input_weights, output_weights)
    name = "fast_self_attn_norm_add_func"
    return attend(SELF_NORM_ADD, name, options, inputs, *tensors, None, None)[0]


class FastSelfAttnNormAddFunc(NamedFunction, constants=("pad_mask",)):
    """Apex's class of :func:`fast_self_attn_norm_add_func`."""

    apply = staticmethod(fast_self_attn_norm_add_func)
