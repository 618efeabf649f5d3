"""Softmax of attention scores with scale and mask, in one pass in each direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled

from ...parallel._shared.native.named_functions import NamedFunction
from ...parallel._shared.native.operands import autocast
from ..enums import AttnMaskType
from . import checked_softmax

__all__ = [
    "FusedScaleMaskSoftmax",
    "GenericScaledMaskedSoftmax",
    "ScaledMaskedSoftmax",
    "ScaledSoftmax",
    "ScaledUpperTriangMaskedSoftmax",
    "generic_scaled_masked_softmax",
    "scaled_masked_softmax",
    "scaled_upper_triang_masked_softmax",
]


def scaled_upper_triang_masked_softmax(inputs: Tensor, _: Any, scale: float) -> Tensor:
    r"""Causal softmax: query i sees keys 0 to i.

    .. math::
        y_{ij} = \frac{e^{s x_{ij}}}{\sum_{k \le i} e^{s x_{ik}}} \quad (j \le i),
        \qquad y_{ij} = 0 \quad (j > i)

    Args:
        inputs: ``[..., sequence, sequence]``; float64, float32, float16 or bfloat16; any layout.
        _: a mask, which is not looked at.
        scale: ``s``.

    Returns:
        Like ``inputs``, contiguous. 16-bit scores are computed in float32 and rounded once. Under
        autocast they are cast to its dtype first.

    Raises:
        TypeError: the dtype is not one of those above.
        ValueError: the last two dimensions differ.

    Example:
        >>> scores = torch.randn(2, 4, 8, 8)
        >>> scaled_upper_triang_masked_softmax(scores, None, 0.125).shape
        torch.Size([2, 4, 8, 8])
    """
    if _is_any_autocast_enabled():
        (inputs,) = autocast(inputs)
    return checked_softmax.causal("scaled_upper_triang_masked_softmax", inputs, scale)


def scaled_masked_softmax(inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    r"""Softmax over keys, of which a mask hides some.

    .. math:: z = \begin{cases}-10000 & \text{masked}\\ s x & \text{else}\end{cases}, \qquad
              y_{ij} = \frac{e^{z_{ij}}}{\sum_k e^{z_{ik}}}

    A query all of whose keys are masked gets zeros.

    Args:
        inputs: ``[batch, heads, queries, keys]``; float64, float32, float16 or bfloat16; any
            layout, any size.
        mask: bool, or uint8 where anything but 0 is true: ``[batch or 1, 1, queries, keys]``, True
            where a key is hidden. None hides nothing.
        scale: ``s``.

    Returns:
        Like ``inputs``, contiguous. 16-bit scores are computed in float32 and rounded once. Under
        autocast they are cast to its dtype first.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: shapes or devices do not fit.

    Example:
        >>> scores, mask = torch.randn(2, 4, 8, 6), torch.zeros(1, 1, 8, 6, dtype=torch.bool)
        >>> scaled_masked_softmax(scores, mask, 0.125).sum(-1).allclose(torch.ones(2, 4, 8))
        True
    """
    if _is_any_autocast_enabled():
        (inputs,) = autocast(inputs)
    return checked_softmax.masked("scaled_masked_softmax", inputs, mask, scale)


def generic_scaled_masked_softmax(inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The same as :func:`scaled_masked_softmax`, which has no limit of sizes here."""
    if _is_any_autocast_enabled():
        (inputs,) = autocast(inputs)
    return checked_softmax.masked("generic_scaled_masked_softmax", inputs, mask, scale)


class ScaledUpperTriangMaskedSoftmax(NamedFunction):
    """:func:`scaled_upper_triang_masked_softmax` of ``[batch * heads, sequence, sequence]``."""

    @staticmethod
    def apply(inputs: Tensor, scale: float) -> Tensor:
        return checked_softmax.causal("ScaledUpperTriangMaskedSoftmax", inputs, scale)


class ScaledMaskedSoftmax(NamedFunction):
    """:func:`scaled_masked_softmax`."""

    @staticmethod
    def apply(inputs: Tensor, mask: Tensor, scale: float) -> Tensor:
        return checked_softmax.masked("ScaledMaskedSoftmax", inputs, mask, scale)


class GenericScaledMaskedSoftmax(NamedFunction):
    """:func:`generic_scaled_masked_softmax`."""

    @staticmethod
    def apply(inputs: Tensor, mask: Tensor, scale: float) -> Tensor:
        return checked_softmax.masked("GenericScaledMaskedSoftmax", inputs, mask, scale)


class ScaledSoftmax(NamedFunction):
    """``softmax(scale * inputs)`` over the last dimension."""

    @staticmethod
    def apply(inputs: Tensor, scale: float) -> Tensor:
        return checked_softmax.scaled("ScaledSoftmax", inputs, scale)


class FusedScaleMaskSoftmax(torch.nn.Module):
    """Scale, mask and softmax of attention scores: by kernels, or as plain PyTorch computes them.

    Args:
        input_in_fp16, input_in_bf16: the scores' dtype; at most one. The kernels run for these.
        attn_mask_type: ``AttnMaskType.padding`` or ``AttnMaskType.causal``.
        scaled_masked_softmax_fusion: whether kernels may run.
        mask_func: ``mask_func(scores, mask)``, what plain PyTorch masks with.
        softmax_in_fp32: plain PyTorch computes 16-bit scores in float32.
        scale: factor of the scores, or None for 1.

    Raises:
        RuntimeError: both dtypes are asked for, or a scale without ``softmax_in_fp32``.
        ValueError: kernels are asked for with another ``attn_mask_type``.

    Apex runs its kernels only for some sizes, and plain PyTorch else; here sizes do not matter.
    The two differ where all keys of a query are masked: kernels give zeros.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise RuntimeError(
                "FusedScaleMaskSoftmax: input_in_fp16 and input_in_bf16 are both True; one at most "
                "can be."
            )
        if scale is not None and not softmax_in_fp32:
            raise RuntimeError(
                f"FusedScaleMaskSoftmax: scale is {scale}, which needs softmax_in_fp32=True."
            )
        if scaled_masked_softmax_fusion and attn_mask_type not in tuple(AttnMaskType):
            raise ValueError(
                "FusedScaleMaskSoftmax: attn_mask_type must be AttnMaskType.padding or "
                f"AttnMaskType.causal, got {attn_mask_type!r}."
            )
        self.input_in_fp16 = input_in_fp16
        self.input_in_bf16 = input_in_bf16
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.attn_mask_type = attn_mask_type
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale

    def forward(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """Probabilities ``[batch, heads, queries, keys]`` of scores of that shape.

        ``mask`` is ``[batch or 1, 1, queries, keys]``, True where a key is hidden, or None. Errors
        are those of :func:`scaled_masked_softmax`.
        """
        if input.dim() != 4:
            raise ValueError(
                "FusedScaleMaskSoftmax: input must have shape [batch, heads, queries, keys], "
                f"got {list(input.shape)}."
            )
        if self.is_kernel_available(mask, *input.shape):
            return self.forward_fused_softmax(input, mask)
        return self.forward_torch_softmax(input, mask)

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Whether kernels run for scores ``[b, np, sq, sk]``."""
        if not (self.scaled_masked_softmax_fusion and self.input_in_float16):
            return False
        return sq == sk if self.attn_mask_type == AttnMaskType.causal else mask is not None

    def forward_fused_softmax(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """What :meth:`forward` does with kernels."""
        scale = 1.0 if self.scale is None else self.scale
        if self.attn_mask_type == AttnMaskType.causal:
            return scaled_upper_triang_masked_softmax(input, mask, scale)
        return scaled_masked_softmax(input, mask, scale)

    def forward_torch_softmax(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """What :meth:`forward` does in plain PyTorch."""
        scores = input.float() if self.input_in_float16 and self.softmax_in_fp32 else input
        if self.scale is not None:
            scores = scores * self.scale
        if mask is not None:
            scores = self.mask_func(scores, mask)
        return torch.softmax(scores, -1).to(input.dtype)

    @staticmethod
    def get_batch_per_block(sq: int, sk: int, b: int, np: int) -> int:
        """Rows that one block of Apex's kernel takes, for code that asks."""
        return checked_softmax.batch_per_block(sk)
