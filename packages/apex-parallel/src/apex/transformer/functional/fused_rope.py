"""Rotary position embeddings, in one pass in each direction.

ROCm's Apex can hand these to the package `aiter`. Here the same kernels run everywhere, so that
the names of that choice are constants: ``USE_ROCM_AITER_ROPE_BACKEND`` changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...parallel._shared.native.named_functions import NamedFunction
from ...parallel._shared.native.plain import explain, plainness
from . import checked_rope
from .rotary_embedding import rotary_embedding

__all__ = [
    "AITER_ROPE_BACKEND",
    "IS_ROCM_PYTORCH",
    "TORCH_MAJOR",
    "TORCH_MINOR",
    "USE_ROCM_AITER_ROPE_BACKEND",
    "FusedRoPE2DFunc",
    "FusedRoPE2DFuncAiter",
    "FusedRoPE2DFuncApex",
    "FusedRoPECachedFunc",
    "FusedRoPECachedFuncAiter",
    "FusedRoPECachedFuncApex",
    "FusedRoPEFunc",
    "FusedRoPEFuncAiter",
    "FusedRoPEFuncApex",
    "FusedRoPETHDFunc",
    "FusedRoPETHDFuncAiter",
    "FusedRoPETHDFuncApex",
    "check_if_rocm_pytorch",
    "fused_apply_rotary_pos_emb",
    "fused_apply_rotary_pos_emb_2d",
    "fused_apply_rotary_pos_emb_cached",
    "fused_apply_rotary_pos_emb_thd",
]

TORCH_MAJOR, TORCH_MINOR = map(int, torch.__version__.split(".")[:2])
"""The version of torch: 2 and 13 of ``2.13.0+cpu``."""


def check_if_rocm_pytorch() -> bool:
    """Whether torch is built for AMD GPUs."""
    return torch.version.hip is not None


IS_ROCM_PYTORCH = check_if_rocm_pytorch()
"""Whether torch is built for AMD GPUs."""
USE_ROCM_AITER_ROPE_BACKEND = False
"""Always False: these kernels run on AMD GPUs too, so AITER's are not called."""
AITER_ROPE_BACKEND = False
"""Always False, for the same reason."""


def fused_apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, transpose_output_memory: bool = False
) -> Tensor:
    r"""Rotate pairs of channels by angles that grow with the position.

    .. math::
        y = t \cos\theta + \mathrm{rotate}(t) \sin\theta, \qquad
        \mathrm{rotate}([a, b]) = [-b, a]

    of the first ``d2`` channels, in halves ``a`` and ``b``; the others are copied.

    Args:
        t: ``[sequence, batch, heads, d]``; float64, float32, float16 or bfloat16; any layout, which
            is read where it is as long as channels are contiguous.
        freqs: angles, ``[sequence or more, 1, 1, d2]``, ``d2`` even and at most ``d``; float32, or
            any floating dtype, which is cast. No gradient reaches them.
        transpose_output_memory: lay the result out in memory as ``[batch, sequence, heads, d]``.

    Returns:
        Like ``t``. 16-bit channels are computed in float32 and rounded once.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: shapes or devices do not fit.

    Source:
        Su et al., *RoFormer*, 2021.

    Example:
        >>> t, freqs = torch.randn(8, 2, 4, 16), torch.randn(8, 1, 1, 16)
        >>> fused_apply_rotary_pos_emb(t, freqs).shape
        torch.Size([8, 2, 4, 16])
    """
    name = "fused_apply_rotary_pos_emb"
    cos, sin = checked_rope.tables_of_angles(name, t, freqs)
    return checked_rope.on_a_line(name, t, cos, sin, transpose_output_memory)


def fused_apply_rotary_pos_emb_cached(
    t: Tensor, cos_: Tensor, sin_: Tensor, transpose_output_memory: bool = False
) -> Tensor:
    """:func:`fused_apply_rotary_pos_emb` with the angles' cosines and sines.

    Args:
        t, transpose_output_memory: as there.
        cos_, sin_: ``[sequence or more, 1, 1, d2]``, float32 or the dtype of ``t``.
    """
    name = "fused_apply_rotary_pos_emb_cached"
    try:
        if (
            (answer := plainness(t, cos_, sin_))
            and t.dim() == cos_.dim() == 4
            and cos_.shape == sin_.shape
            and cos_.shape[1] == cos_.shape[2] == 1
            and not t.is_meta
        ):
            cos = cos_.detach().flatten(0, 2).contiguous()
            sin = sin_.detach().flatten(0, 2).contiguous()
            given = t.permute(1, 2, 0, 3), cos, sin, None, not transpose_output_memory
            return rotary_embedding.plain[answer](*given).permute(2, 0, 1, 3)
    except (AttributeError, RuntimeError):  # of None, and of the operator's checks
        explain(checked_rope.tables_of_line, name, t, cos_, sin_)
    cos, sin = checked_rope.tables_of_line(name, t, cos_, sin_)
    return checked_rope.on_a_line(name, t, cos, sin, transpose_output_memory)


def fused_apply_rotary_pos_emb_thd(t: Tensor, cu_seqlens: Tensor, freqs: Tensor) -> Tensor:
    """:func:`fused_apply_rotary_pos_emb` of sequences behind each other; positions restart in each.

    Args:
        t: ``[tokens, heads, d]``.
        cu_seqlens: int32 or int64 ``[sequences + 1]``, where sequences begin, and where the last
            ends: 0 first, then never less than before, and the number of tokens last. Sequences may
            be empty.
        freqs: ``[longest sequence or more, 1, 1, d2]``. A longer sequence is an error on the CPU;
            on a GPU, which would have to wait for it, tokens without angles become NaN.

    Returns:
        Like ``t``, contiguous.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: shapes or devices do not fit, or on a CPU ``cu_seqlens`` falls, or begins or
            ends elsewhere. A GPU does not check that: tokens behind the end go on counting, and
            where ``cu_seqlens`` falls, positions have no meaning.
    """
    name = "fused_apply_rotary_pos_emb_thd"
    cos, sin = checked_rope.tables_of_angles(name, t, freqs)
    return checked_rope.of_sequences(name, t, cu_seqlens, cos, sin)


def fused_apply_rotary_pos_emb_2d(
    t: Tensor,
    img_h: int,
    img_w: int,
    cos_h: Tensor,
    sin_h: Tensor,
    cos_w: Tensor,
    sin_w: Tensor,
) -> Tensor:
    """Rotate one half of the channels by a token's row in an image, the other by its column.

    Args:
        t: ``[batch, img_h * img_w, heads, d]``, ``d`` a multiple of 4.
        img_h, img_w: height and width, in tokens.
        cos_h, sin_h: ``[1, img_h or more, 1, d / 2]``, float32 or the dtype of ``t``.
        cos_w, sin_w: ``[1, img_w or more, 1, d / 2]``.

    Returns:
        Like ``t``, contiguous.
    """
    tables = {"cos_h": cos_h, "sin_h": sin_h, "cos_w": cos_w, "sin_w": sin_w}
    return checked_rope.on_a_plane("fused_apply_rotary_pos_emb_2d", t, img_h, img_w, tables)


class FusedRoPEFunc(NamedFunction, constants=("freqs",)):
    """:func:`fused_apply_rotary_pos_emb`."""

    @staticmethod
    def apply(t: Tensor, freqs: Tensor, transpose_output_memory: bool = False) -> Tensor:
        return fused_apply_rotary_pos_emb(t, freqs, transpose_output_memory)


class FusedRoPECachedFunc(NamedFunction, constants=("cos_", "sin_")):
    """:func:`fused_apply_rotary_pos_emb_cached`."""

    @staticmethod
    def apply(
        t: Tensor, cos_: Tensor, sin_: Tensor, transpose_output_memory: bool = False
    ) -> Tensor:
        return fused_apply_rotary_pos_emb_cached(t, cos_, sin_, transpose_output_memory)


class FusedRoPETHDFunc(NamedFunction, constants=("freqs",)):
    """:func:`fused_apply_rotary_pos_emb_thd`."""

    @staticmethod
    def apply(t: Tensor, cu_seqlens: Tensor, freqs: Tensor) -> Tensor:
        return fused_apply_rotary_pos_emb_thd(t, cu_seqlens, freqs)


class FusedRoPE2DFunc(NamedFunction, constants=("cos_h", "sin_h", "cos_w", "sin_w")):
    """:func:`fused_apply_rotary_pos_emb_2d`."""

    @staticmethod
    def apply(
        t: Tensor,
        img_h: int,
        img_w: int,
        cos_h: Tensor,
        sin_h: Tensor,
        cos_w: Tensor,
        sin_w: Tensor,
    ) -> Tensor:
        return fused_apply_rotary_pos_emb_2d(t, img_h, img_w, cos_h, sin_h, cos_w, sin_w)


class FusedRoPEFuncApex(FusedRoPEFunc):
    """Another name of :class:`FusedRoPEFunc`, as all that follow."""


class FusedRoPEFuncAiter(FusedRoPEFunc):
    """See :class:`FusedRoPEFuncApex`."""


class FusedRoPECachedFuncApex(FusedRoPECachedFunc):
    """See :class:`FusedRoPEFuncApex`."""


class FusedRoPECachedFuncAiter(FusedRoPECachedFunc):
    """See :class:`FusedRoPEFuncApex`."""


class FusedRoPETHDFuncApex(FusedRoPETHDFunc):
    """See :class:`FusedRoPEFuncApex`."""


class FusedRoPETHDFuncAiter(FusedRoPETHDFunc):
    """See :class:`FusedRoPEFuncApex`."""


class FusedRoPE2DFuncApex(FusedRoPE2DFunc):
    """See :class:`FusedRoPEFuncApex`."""


class FusedRoPE2DFuncAiter(FusedRoPE2DFunc):
    """See :class:`FusedRoPEFuncApex`."""
