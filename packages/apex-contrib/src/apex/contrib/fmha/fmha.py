"""Attention of packed sequences under the names of Apex's fmha."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._shared.native.composed import Composed, plainly
from .._shared.native.half_matmul import needs_float32
from .._shared.native.named_functions import NamedFunction
from .._shared.native.philox import draw_seed
from .._shared.native.transforms import kernels_serve
from ..multihead_attn import core
from ..multihead_attn.torch_attention import attend_packed, serves_packed
from .packed import Layout, check_packed, pad, spans, unpad

__all__ = ["FMHA", "FMHAFun"]

_NAME = "FMHAFun"


_Option = tuple[float, int]  # p, max_s
# Up to so many tokens, the operators' calls for a sequence take longer than the padding.
_SHORT = 64


def _attention(qkv: Tensor, cu_seqlens: Tensor, p: float, max_s: int) -> Tensor:
    """``[total, heads, d]`` of ``[total, 3, heads, d]``."""
    if serves_packed(qkv, p) and kernels_serve():
        return attend_packed(qkv, cu_seqlens, max_s)
    # Compiled code, and a GPU without being waited for, do not know the lengths.
    knows_lengths = qkv.is_cpu and not torch.compiler.is_compiling()
    attend = _one_by_one if knows_lengths and max_s > _SHORT else _padded
    return attend((float(p), max_s), qkv, cu_seqlens, draw_seed(qkv.device) if p else None)


def _of_heads(qkv: Tensor, p: float) -> tuple[int, float, float]:
    """The option of :mod:`..multihead_attn.core`."""
    return qkv.shape[2], qkv.shape[3] ** -0.5, p


def _padded(option: _Option, qkv: Tensor, cu_seqlens: Tensor, seed: Tensor | None) -> Tensor:
    p, max_s = option
    _, _, heads, size = qkv.shape
    layout = Layout(cu_seqlens, qkv.shape[0], max_s)
    padded = pad(qkv, layout).permute(2, 0, 3, 1, 4)  # [3, b, heads, s, d]
    each = padded.reshape(3, layout.batch * heads, max_s, size)
    context = core.context_of(_of_heads(qkv, p), each, None, layout.mask, seed)
    by_token = context.view(layout.batch, heads, max_s, size).transpose(1, 2)
    return unpad(by_token, layout)


def _forward(
    option: _Option, qkv: Tensor, cu_seqlens: Tensor, seed: Tensor | None
) -> tuple[Tensor, ...]:
    """One sequence after the other, with the random numbers that it has in a padded batch."""
    p, max_s = option
    heads, kept = qkv.shape[2], []
    y = qkv.new_zeros(qkv.shape[0], *qkv.shape[2:])
    for index, begin, end in spans(cu_seqlens):
        each = qkv[begin:end].permute(1, 2, 0, 3)  # [3, heads, s, d]
        corner = index * heads, max_s, max_s
        context, *others = core.forward(_of_heads(qkv, p), each, None, None, seed, *corner)
        y[begin:end] = context.transpose(0, 1)
        kept += others
    return y, *kept


def _backward(
    option: _Option, needs: Sequence[bool], dy: Tensor, saved: Sequence[Tensor]
) -> list[Tensor | None]:
    qkv, cu_seqlens, seed, *kept = saved
    dqkv = torch.zeros_like(qkv)
    for i, (_, begin, end) in enumerate(spans(cu_seqlens)):
        each = qkv[begin:end].permute(1, 2, 0, 3)
        given = each, None, None, seed, *kept[2 * i : 2 * i + 2]
        of_heads = _of_heads(qkv, option[0])
        dqueries = core.backward(of_heads, needs, dy[begin:end].transpose(0, 1), given)[0]
        dqkv[begin:end] = dqueries.permute(2, 0, 1, 3)
    return [dqkv, None, None]


_one_by_one = Composed(_NAME, _forward, _backward, _padded)


class FMHAFun(NamedFunction):
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
