"""Attention of packed sequences under the names of Apex's fmha."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .._shared.native.composed import plainly
from .._shared.native.half_products import needs_float32
from .._shared.native.philox import draw_seed
from .._shared.native.transforms import kernels_serve
from ..multihead_attn.core import context_of
from ..multihead_attn.torch_attention import attend_packed, serves_packed
from .packed import Layout, check_packed, pad, unpad

__all__ = ["FMHA", "FMHAFun"]

_NAME = "FMHAFun"


def _attention(qkv: Tensor, cu_seqlens: Tensor, p: float, max_s: int) -> Tensor:
    """``[total, heads, d]`` of ``[total, 3, heads, d]``."""
    if serves_packed(qkv, p) and kernels_serve():
        return attend_packed(qkv, cu_seqlens, max_s)
    _, _, heads, size = qkv.shape
    layout = Layout(cu_seqlens, qkv.shape[0], max_s)
    padded = pad(qkv, layout).permute(2, 0, 3, 1, 4)  # [3, b, heads, s, d]
    each = padded.reshape(3, layout.batch * heads, max_s, size)
    seed = draw_seed(qkv.device) if p else None
    context = context_of((heads, size**-0.5, float(p)), each, None, layout.mask, seed)
    by_token = context.view(layout.batch, heads, max_s, size).transpose(1, 2)
    return unpad(by_token, layout)


class FMHAFun:
    r"""Self attention of packed sequences: call :meth:`apply`.

    .. math:: y = \mathrm{dropout}(\mathrm{softmax}(q k^T / \sqrt{d})) \, v

    for every sequence and head, with no token seeing another sequence.
    """

    @staticmethod
    def apply(
        qkv: Tensor,
        cu_seqlens: Tensor,
        p_dropout: float,
        max_s: int,
        is_training: bool,
        zero_tensors: bool = False,
    ) -> Tensor:
        """Return ``[total, heads, d]``, like ``qkv``.

        Args:
            qkv: ``[total, 3, heads, d]``; float64, float32, float16 or bfloat16; any layout.
            cu_seqlens: ``[batch + 1]`` int32: where each sequence begins, and the last one ends.
            p_dropout: probability in ``[0, 1]`` that an attention weight is dropped in training.
            max_s: length of the longest sequence, at least.
            is_training: whether to drop anything.
            zero_tensors: has no effect; results of tokens outside of all sequences are 0 anyway.

        Raises:
            TypeError: a dtype is not one of those above.
            ValueError: a shape, a device, ``p_dropout``, or on a CPU a length does not fit. A GPU
                does not check lengths: sequences longer than ``max_s`` give wrong results.
        """
        p = p_dropout if is_training else 0.0
        check_packed(_NAME, qkv, cu_seqlens, max_s, p)
        if not needs_float32(qkv, qkv):
            return plainly(qkv, _attention, qkv, cu_seqlens, p, max_s)
        return plainly(qkv, _attention, qkv.float(), cu_seqlens, p, max_s).to(qkv.dtype)

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """:meth:`apply`, with the signature that Apex's class has; ``ctx`` is not used."""
        return FMHAFun.apply(*arguments)


class FMHA(nn.Module):
    """Self attention of packed sequences, without projections.

    Args:
        config: has ``attention_probs_dropout_prob``, ``num_attention_heads`` and ``hidden_size``, a
            multiple of the heads.

    Raises:
        ValueError: ``hidden_size`` is none.

    Source:
        Vaswani et al. 2017, "Attention is all you need", section 3.2,
        https://arxiv.org/abs/1706.03762; Apex's class of this name.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(
        ...     attention_probs_dropout_prob=0.1, num_attention_heads=2, hidden_size=128
        ... )
        >>> lengths = torch.tensor([0, 3, 8], dtype=torch.int32)  # sequences of 3 and 5 tokens
        >>> FMHA(config)(torch.randn(8, 3 * 128), lengths, 5).shape
        torch.Size([8, 128])
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.p_dropout = config.attention_probs_dropout_prob
        self.h, self.hidden_size = config.num_attention_heads, config.hidden_size
        if self.h < 1 or self.hidden_size % self.h:
            raise ValueError(
                f"FMHA: config.hidden_size must be a multiple of config.num_attention_heads, got "
                f"{self.hidden_size} and {self.h}."
            )
        self.d = self.hidden_size // self.h

    def forward(
        self,
        qkv: Tensor,
        cu_seqlens: Tensor,
        max_s: int,
        is_training: bool = True,
        zero_tensors: bool = False,
    ) -> Tensor:
        """Return ``[total, hidden_size]`` of ``qkv`` ``[total, 3 * hidden_size]``.

        The other arguments are those of :class:`FMHAFun`.
        """
        if qkv.dim() != 2 or qkv.shape[1] != 3 * self.hidden_size:
            raise ValueError(
                f"FMHA: qkv must have shape [total, {3 * self.hidden_size}], got {list(qkv.shape)}."
            )
        each = qkv.view(-1, 3, self.h, self.d)
        p = self.p_dropout if is_training else 0.0
        y = FMHAFun.apply(each, cu_seqlens, p, max_s, is_training, zero_tensors)
        return y.reshape(-1, self.hidden_size)
