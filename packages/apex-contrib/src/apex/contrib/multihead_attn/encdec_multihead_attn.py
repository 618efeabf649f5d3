"""Attention of one sequence to another as a module, under Apex's names."""

from __future__ import annotations

from torch import Tensor

from .attention import Options
from .checks import is_same
from .functions import ENCDEC, ENCDEC_NORM_ADD, attend
from .parameters import Attention, jit_dropout_add

__all__ = ["EncdecMultiheadAttn", "jit_dropout_add"]


class EncdecMultiheadAttn(Attention):
    """Multihead attention of a decoder's sequence to an encoder's.

    Args:
        embed_dim, num_heads, dropout, bias, include_norm_add, impl: as of
            :class:`~apex.contrib.multihead_attn.SelfMultiheadAttn`; the layer norm is that of the
            query.

    Attributes:
        in_proj_weight_q, in_proj_bias_q: ``[e, e]`` and ``[e]``.
        in_proj_weight_kv, in_proj_bias_kv: ``[2e, e]`` and ``[2e]``, laid out as
            ``[heads, 2, d, e]``.
        out_proj_weight, out_proj_bias: ``[e, e]`` and ``[e]``.
        lyr_nrm_gamma_weights, lyr_nrm_beta_weights: ``[e]``, with ``include_norm_add``.

    Raises:
        ValueError: a size, ``dropout`` or ``impl`` is out of range.

    Source:
        Vaswani et al. 2017, "Attention is all you need", section 3.2,
        https://arxiv.org/abs/1706.03762; Apex's class of this name.

    Example:
        >>> attention = EncdecMultiheadAttn(64, 4)
        >>> decoder, encoder = torch.randn(5, 2, 64), torch.randn(9, 2, 64)
        >>> attention(decoder, encoder, encoder)[0].shape
        torch.Size([5, 2, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        include_norm_add: bool = False,
        impl: str = "fast",
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, include_norm_add, impl)
        self._add_parameters({"in_proj_weight_q": 1, "in_proj_weight_kv": 2, "out_proj_weight": 1})

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        is_training: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs like ``query``, and attention weights or None.

        Args:
            query: ``[t, b, e]``; float64, float32, float16 or bfloat16, as the parameters.
            key: ``[s, b, e]``.
            value: ``key`` again, or None.
            key_padding_mask: ``[b, s]``: hides a key where it is not 0, whatever its dtype.
            need_weights: return the weights, ``[b, t, s]``, averaged over heads, after dropout.
            attn_mask: ``[t, s]``, for queries and keys: hides what is not 0. Not together with the
                other mask.
            is_training: whether to drop anything; ``train()`` and ``eval()`` change nothing.

        Raises:
            TypeError: dtypes do not fit.
            ValueError: a shape or device does not fit, ``value`` is another tensor than ``key``, or
                there are two masks.
        """
        name = "EncdecMultiheadAttn"
        if value is not None and not is_same(value, key):
            raise ValueError(
                f"{name}: value must be the tensor key, because both are projected from it."
            )
        mask, is_time_mask = self._mask(key_padding_mask, attn_mask)
        p = self.dropout if is_training else 0.0
        options = Options(self.num_heads, self.scaling, mask, is_time_mask, False, p, need_weights)
        is_normed = self.include_norm_add
        kind = ENCDEC_NORM_ADD if is_normed else ENCDEC
        norm = (self.lyr_nrm_gamma_weights, self.lyr_nrm_beta_weights) if is_normed else ()
        weights = (self.in_proj_weight_q, self.in_proj_weight_kv, self.out_proj_weight)
        biases = (self.in_proj_bias_q, self.in_proj_bias_kv, self.out_proj_bias)
        return attend(kind, name, options, query, *norm, key, *weights, *biases)
