"""Softmax of masked attention scores with dropout, under Apex's names."""

from __future__ import annotations

from torch import Tensor

from .._shared.native.named_functions import NamedFunction
from .._shared.native.operands import autocast, check_floating
from .attention import kernel_mask, masked_weights
from .checks import check_heads, check_mask, check_probability
from .weights import decompositions

__all__ = ["MaskSoftmaxDropout", "decompositions", "fast_mask_softmax_dropout_func"]

_NAME = "fast_mask_softmax_dropout_func"


def fast_mask_softmax_dropout_func(
    is_training: bool,
    heads: int,
    inputs: Tensor,
    pad_mask: Tensor | None,
    mask_additive: bool,
    dropout_prob: float,
) -> Tensor:
    r"""Softmax of masked attention scores, then dropout in training.

    .. math:: y = \mathrm{dropout}(\mathrm{softmax}(x + m))

    Args:
        is_training: whether to drop anything.
        heads: heads of attention, which share a mask.
        inputs: scores ``[batch * heads, queries, keys]``, in any layout; float64, float32, float16
            or bfloat16, computed in float32 at least.
        pad_mask: ``[batch, keys]`` or None; hides a key where it is not 0.
        mask_additive: ``pad_mask`` is floating point and added to the scores instead.
        dropout_prob: in ``[0, 1]``; others are multiplied by ``1 / (1 - dropout_prob)``.

    Returns:
        Like ``inputs``, contiguous. A row whose keys are all hidden is NaN, as that of
        ``torch.softmax``.

    Raises:
        TypeError: ``inputs``, or a mask that is added, is not floating point.
        ValueError: a shape, a device or ``dropout_prob`` does not fit.

    Note:
        What is dropped depends on one number drawn from the device's default generator, and on the
        element's index; see docs/contrib/multihead_attn.md.

    Source:
        Vaswani et al. 2017, "Attention is all you need", section 3.2.1,
        https://arxiv.org/abs/1706.03762; Apex's function of this name.

    Example:
        >>> scores, mask = torch.randn(2 * 4, 6, 6), torch.zeros(2, 6, dtype=torch.bool)
        >>> fast_mask_softmax_dropout_func(True, 4, scores, mask, False, 0.1).shape
        torch.Size([8, 6, 6])
    """
    check_floating(_NAME, "inputs", inputs)
    (inputs,) = autocast(inputs)
    check_probability(_NAME, dropout_prob)
    if inputs.dim() != 3:
        raise ValueError(
            f"{_NAME}: inputs must have shape [batch * heads, queries, keys], got "
            f"{list(inputs.shape)}."
        )
    check_heads(_NAME, "inputs' first dimension", inputs.shape[0], heads)
    scores = inputs.contiguous().view(inputs.shape[0] // heads, heads, *inputs.shape[1:])
    if pad_mask is not None:
        expected = (scores.shape[0], scores.shape[-1])
        check_mask(_NAME, "pad_mask", pad_mask, expected, inputs.device, mask_additive)
    mask = kernel_mask(pad_mask, False, mask_additive, scores.shape, inputs.dtype)
    p = dropout_prob if is_training else 0.0
    return masked_weights(scores, mask, p).view(inputs.shape)


class MaskSoftmaxDropout(NamedFunction, constants=("pad_mask",)):
    """Apex's class of :func:`fast_mask_softmax_dropout_func`."""

    apply = staticmethod(fast_mask_softmax_dropout_func)
