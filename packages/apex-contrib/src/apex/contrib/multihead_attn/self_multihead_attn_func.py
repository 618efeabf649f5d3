"""Self attention as a function, under Apex's names."""

from __future__ import annotations

from torch import Tensor

from .._shared.native.named_functions import NamedFunction
from .attention import Options
from .functions import SELF, attend

__all__ = ["SelfAttnFunc", "self_attn_func"]


def self_attn_func(
    use_time_mask: bool,
    is_training: bool,
    heads: int,
    scale: float,
    inputs: Tensor,
    input_weights: Tensor,
    output_weights: Tensor,
    input_biases: Tensor | None,
    output_biases: Tensor | None,
    mask: Tensor | None,
    is_additive_mask: bool,
    dropout_prob: float,
) -> Tensor:
    r"""Multihead attention of a sequence to itself.

    .. math::
        q, k, v = W_\mathrm{in} x + b_\mathrm{in}, \qquad
        a = \mathrm{dropout}(\mathrm{softmax}(s \, q k^T + m)), \qquad
        y = W_\mathrm{out} (a v) + b_\mathrm{out}

    Args:
        use_time_mask: ``mask`` is ``[t, t]``, for queries and keys, instead of ``[b, t]``.
        is_training: whether to drop anything.
        heads: a divisor of ``e``.
        scale: multiplies the scores.
        inputs: ``[t, b, e]``; float64, float32, float16 or bfloat16; any layout.
        input_weights: ``[3e, e]``, laid out as ``[heads, 3, e / heads, e]``: q, k and v of a head
            follow each other.
        output_weights: ``[e, e]``.
        input_biases, output_biases: ``[3e]`` and ``[e]``, or None.
        mask: None, or what hides a key where it is not 0.
        is_additive_mask: the mask is floating point, and added to the scores instead.
        dropout_prob: of the attention weights, in ``[0, 1]``.

    Returns:
        Like ``inputs``. A query whose keys are all hidden gives NaN.

    Raises:
        TypeError: a dtype is not one of those above, or dtypes differ.
        ValueError: a shape, a device or ``dropout_prob`` does not fit.

    Source:
        Vaswani et al. 2017, "Attention is all you need", section 3.2,
        https://arxiv.org/abs/1706.03762; Apex's function of this name.

    Example:
        >>> x, w_in, w_out = torch.randn(5, 2, 8), torch.randn(24, 8), torch.randn(8, 8)
        >>> self_attn_func(False, True, 4, 0.7, x, w_in, w_out, None, None, None, False, 0.1).shape
        torch.Size([5, 2, 8])
    """
    p = dropout_prob if is_training else 0.0
    options = Options(heads, scale, mask, use_time_mask, bool(is_additive_mask), p)
    tensors = (inputs, input_weights, output_weights, input_biases, output_biases)
    return attend(SELF, "self_attn_func", options, *tensors)[0]


class SelfAttnFunc(NamedFunction, constants=("mask",)):
    """Apex's class of :func:`self_attn_func`."""

    apply = staticmethod(self_attn_func)
