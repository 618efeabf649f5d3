"""Self attention as a module, under Apex's names."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import Options
from .checks import is_same
from .functions import SELF, SELF_NORM_ADD, attend
from .parameters import Attention, jit_dropout_add

__all__ = ["SelfMultiheadAttn", "jit_dropout_add"]


class SelfMultiheadAttn(Attention):
    r"""Multihead attention of a sequence to itself.

    .. math::
        q, k, v = W_\mathrm{in} x + b_\mathrm{in}, \qquad
        a = \mathrm{dropout}(\mathrm{softmax}(q k^T / \sqrt{d} + m)), \qquad
        y = W_\mathrm{out} (a v) + b_\mathrm{out}

    Args:
        embed_dim: ``e``, a multiple of ``num_heads``.
        num_heads: heads, each of ``d = e / num_heads`` features.
        dropout: probability in ``[0, 1]`` that an attention weight is dropped in training.
        bias: whether the two projections have biases.
        include_norm_add: return ``x + dropout(y)``, with y of the layer norm of x.
        impl: "fast" and "default" compute the same.
        separate_qkv_params: keep q, k and v in parameters of their own.
        mask_additive: ``key_padding_mask`` is floating point and added to the scores.

    Attributes:
        in_proj_weight: ``[3e, e]``, laid out as ``[heads, 3, d, e]``; or with
            ``separate_qkv_params`` ``q_weight``, ``k_weight`` and ``v_weight``, ``[e, e]`` each.
        in_proj_bias: ``[3e]`` in the same layout; or ``q_bias``, ``k_bias``, ``v_bias``, ``[e]``.
        out_proj_weight, out_proj_bias: ``[e, e]`` and ``[e]``.
        lyr_nrm_gamma_weights, lyr_nrm_beta_weights: ``[e]``, with ``include_norm_add``.

    Raises:
        ValueError: a size, ``dropout`` or ``impl`` is out of range.

    Source:
        Vaswani et al. 2017, "Attention is all you need", section 3.2,
        https://arxiv.org/abs/1706.03762; Apex's class of this name.

    Example:
        >>> attention = SelfMultiheadAttn(64, 4, dropout=0.1, bias=True)
        >>> x = torch.randn(10, 2, 64)  # time, batch, features
        >>> attention(x, x, x)[0].shape
        torch.Size([10, 2, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        include_norm_add: bool = False,
        impl: str = "fast",
        separate_qkv_params: bool = False,
        mask_additive: bool = False,
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, include_norm_add, impl)
        self.separate_qkv_params, self.mask_additive = separate_qkv_params, mask_additive
        own = {"q_weight": 1, "k_weight": 1, "v_weight": 1}
        projections = own if separate_qkv_params else {"in_proj_weight": 3}
        self._add_parameters(projections | {"out_proj_weight": 1})

    def _in_proj(self) -> tuple[Tensor, Tensor | None]:
        if not self.separate_qkv_params:
            return self.in_proj_weight, self.in_proj_bias
        e, by_head = self.embed_dim, (self.num_heads, self.head_dim)
        weights = [w.view(*by_head, e) for w in (self.q_weight, self.k_weight, self.v_weight)]
        weight = torch.stack(weights, 1).reshape(3 * e, e)
        if not self.bias:
            return weight, None
        biases = [b.view(by_head) for b in (self.q_bias, self.k_bias, self.v_bias)]
        return weight, torch.stack(biases, 1).reshape(3 * e)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        is_training: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs like ``query``, and attention weights or None.

        Args:
            query: ``[t, b, e]``; float64, float32, float16 or bfloat16, as the parameters.
            key, value: ``query`` again, or None.
            key_padding_mask: ``[b, t]``, which hides a key where it is not 0, whatever its dtype,
                or with ``mask_additive`` is added to the scores.
            need_weights: return the weights, ``[b, t, t]``, averaged over heads, after dropout.
            attn_mask: ``[t, t]``, for queries and keys: hides what is not 0. Not together with the
                other mask.
            is_training: whether to drop anything; ``train()`` and ``eval()`` change nothing.

        Raises:
            TypeError: dtypes do not fit.
            ValueError: a shape or device does not fit, ``key`` or ``value`` is another tensor than
                ``query``, or there are two masks.
        """
        name = "SelfMultiheadAttn"
        for argument, tensor in (("key", key), ("value", value)):
            if tensor is not None and tensor is not query and not is_same(tensor, query):
                raise ValueError(
                    f"{name}: {argument} must be the tensor query, because both are projected "
                    "from it; use EncdecMultiheadAttn for attention to another tensor."
                )
        mask, is_time_mask = self._mask(key_padding_mask, attn_mask)
        is_added = self.mask_additive and not is_time_mask
        p = self.dropout if is_training else 0.0
        options = Options(
            self.num_heads, self.scaling, mask, is_time_mask, is_added, p, need_weights
        )
        is_normed = self.include_norm_add
        kind = SELF_NORM_ADD if is_normed else SELF
        norm = (self.lyr_nrm_gamma_weights, self.lyr_nrm_beta_weights) if is_normed else ()
        own = self._parameters
        try:  # attributes of modules take a while to look up
            w_in, b_in = own["in_proj_weight"], own["in_proj_bias"]
            w_out, b_out = own["out_proj_weight"], own["out_proj_bias"]
        except KeyError:  # three of them, or parametrized
            w_in, b_in = self._in_proj()
            w_out, b_out = self.out_proj_weight, self.out_proj_bias
        return attend(kind, name, options, query, *norm, w_in, w_out, b_in, b_out)
