"""Attention with pair bias, under the names that OpenFold imports from Apex."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .._shared.native.named_functions import NamedFunction
from .attention import attention

__all__ = [
    "AttnBiasJIT",
    "AttnNoBiasJIT",
    "AttnTri",
    "CanSchTriMHA",
    "FusedAttenionCoreFunc",
    "disable",
    "enable",
    "is_enabled",
    "schedule_triton_mha",
]

_is_enabled = False


def is_enabled() -> bool:
    """Whether :func:`enable` was called last. Models ask it; nothing here does."""
    return _is_enabled


def enable() -> None:
    """Let :func:`is_enabled` say True."""
    global _is_enabled
    _is_enabled = True


def disable() -> None:
    """Let :func:`is_enabled` say False, as it does at first."""
    global _is_enabled
    _is_enabled = False


def AttnTri(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    inf: float = 1000000000.0,
    is_training: bool = True,
) -> Tensor:
    r"""Attention with a mask and a bias of pairs, which gets a gradient.

    .. math:: y = \mathrm{softmax}\left(\frac{q k^T}{\sqrt{d}} + (m - 1) \cdot \mathrm{inf} + b
              \right) v

    Args:
        q: queries ``[..., heads, n, d]``; float64, float32, float16 or bfloat16; any layout, and
            any sizes from 1.
        k, v: keys and values ``[..., heads, keys, d]``, of its dtype. (In Apex ``keys`` is ``n``.)
        mask: 1 where a key is seen and 0 where it is hidden, of any dtype; broadcastable to the
            scores, ``[..., heads, n, keys]``: OpenFold's is ``[1, z, 1, 1, keys]``, for queries
            ``[z, heads, n, d]``, too. No gradient.
        bias: likewise broadcastable: OpenFold's is ``[1, 1, heads, n, keys]``. Rounded to the dtype
            of ``q``. Its gradient is summed over what it is broadcast along.
        inf: what hides a key, in units of scores; finite, ``>= 0``.
        is_training: changes nothing: what is kept for a backward depends on what needs a gradient.

    Returns:
        ``[..., heads, n, d]`` (``d`` that of ``v``), of the dtype of ``q``. Scores and softmax are
        computed in float32 at least. A query all of whose keys are hidden sees all of them, because
        softmax ignores what is added to all scores. Under autocast all but the mask are cast to its
        dtype first, except float64.

    Raises:
        TypeError: a tensor is of another dtype, or dtypes or devices of ``q``, ``k`` and ``v``
            differ.
        ValueError: shapes or devices do not fit, the mask requires a gradient, or ``inf`` is out of
            range.

    Source:
        Jumper et al. 2021, "Highly accurate protein structure prediction with AlphaFold",
        supplementary algorithms 7 and 13, https://doi.org/10.1038/s41586-021-03819-2

    Example:
        >>> q, k, v = torch.randn(3, 1, 6, 4, 10, 16)  # 6 rows, 4 heads, 10 residues, 16 features
        >>> mask, bias = torch.ones(1, 6, 1, 1, 10), torch.randn(1, 1, 4, 10, 10)
        >>> AttnTri(q, k, v, mask, bias).shape
        torch.Size([1, 6, 4, 10, 16])
    """
    return attention("AttnTri", q, k, v, mask, bias, inf)


class FusedAttenionCoreFunc(NamedFunction, constants=("mask",)):
    """Apex's class of :func:`AttnTri`, spelt as there."""

    apply = staticmethod(AttnTri)


def AttnBiasJIT(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, bias: Tensor, inf: float
) -> Tensor:
    """:func:`AttnTri`: Apex has a compiled formula of the same under this name.

    Arguments, result and errors are those of :func:`AttnTri`.
    """
    return attention("AttnBiasJIT", query, key, value, mask, bias, inf)


def AttnNoBiasJIT(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, inf: float) -> Tensor:
    """:func:`AttnTri` without bias.

    Arguments, result and errors are those of :func:`AttnTri`.
    """
    return attention("AttnNoBiasJIT", query, key, value, mask, None, inf)


_attention_bias, _attention_no_bias = AttnBiasJIT, AttnNoBiasJIT


def CanSchTriMHA(
    in_shape: Sequence[int],
    has_bias: bool = True,
    inf: float = 1000000000.0,
    training: bool = True,
) -> bool:
    """Whether Apex would take its Triton kernel for queries of this shape, and not the formula.

    Here :func:`AttnTri` takes every shape, and :func:`AttnBiasJIT` computes the same, so that the
    answer decides nothing but the name that is called.

    Args:
        in_shape: of the queries; a list, tuple or ``torch.Size``.
        has_bias, inf, training: the answer is False without a bias, with another ``inf`` than 1e9,
            and in evaluation (where Apex would take its kernel for some shapes).

    Returns:
        True for ``[1, z, heads, n, d]`` with z from 16 to 256, 4 or 8 heads, n of 128 or 256, and d
        of 16 or 32.
    """
    if not (has_bias and training and inf == 1e9 and len(in_shape) == 5):
        return False
    one, z, heads, n, d = map(int, in_shape)
    return one == 1 and 16 <= z <= 256 and heads in (4, 8) and n in (128, 256) and d in (16, 32)


def schedule_triton_mha(in_shape: Sequence[int], fwd: bool = True) -> tuple[int, int, int, int]:
    """Tile sizes for a Triton kernel of attention, for scripts that launch one of their own.

    Nothing here has such tiles or asks for them. They are as large as a tile of scores of 128 (in
    the backward 64) times 64 float32 numbers allows, and no larger than the sequence needs.

    Args:
        in_shape: of the queries, ``[..., n, d]``.
        fwd: for the forward kernel, instead of the backward one.

    Returns:
        ``BLOCK_M`` and ``BLOCK_N``, powers of two from 16; warps; stages of the pipeline.
    """
    needed = max(16, 1 << (int(in_shape[-2]) - 1).bit_length())
    rows, columns = min(128 if fwd else 64, needed), min(64, needed)
    return rows, columns, 4 if rows * columns >= 4096 else 2, 1
