"""Self attention with the usual scale as a function, under Apex's names."""

from __future__ import annotations

from torch import Tensor

from .._shared.native.named_functions import NamedFunction
from .attention import Options
from .functions import SELF, attend

__all__ = ["FastSelfAttnFunc", "fast_self_attn_func"]


def fast_self_attn_func(
    use_time_mask: bool,
    is_training: bool,
    heads: int,
    inputs: Tensor,
    input_weights: Tensor,
    output_weights: Tensor,
    input_biases: Tensor | None,
    output_biases: Tensor | None,
    pad_mask: Tensor | None,
    mask_additive: bool,
    dropout_prob: float,
) -> Tensor:
    """Self attention of ``[t, b, e]`` with the scale ``(e / heads) ** -0.5``.

    :func:`~apex.contrib.multihead_attn.self_multihead_attn_func.self_attn_func` describes the
    arguments; ``pad_mask`` is its ``mask``, and ``mask_additive`` its ``is_additive_mask``.
    """
    p = dropout_prob if is_training else 0.0
    options = Options(heads, None, pad_mask, use_time_mask, bool(mask_additive), p)
    tensors = (inputs, input_weights, output_weights, input_biases, output_biases)
    return attend(SELF, "fast_self_attn_func", options, *tensors)[0]


class FastSelfAttnFunc(NamedFunction, constants=("pad_mask",)):
    """Apex's class of :func:`fast_self_attn_func`."""

    apply = staticmethod(fast_self_attn_func)
