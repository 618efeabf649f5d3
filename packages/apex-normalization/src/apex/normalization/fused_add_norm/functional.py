"""Residual connection and normalization as functions."""

from __future__ import annotations

from torch import Tensor

from .._shared.native.plain import plainness
from ..fused_layer_norm.checks import rms_eps
from .checks import are_right, check_add_operands
from .formulas import add_layer_norm, add_rms_norm, run


def fused_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    prenorm: bool = False,
    zero_centered_gamma: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Layer normalization of a residual connection's sum, in one pass over memory.

    .. math::
        s = x + \mathrm{residual}, \qquad
        y = \frac{s - \mathrm{mean}(s)}{\sqrt{\mathrm{var}(s) + \epsilon}} \, w + b

    The sum is rounded to its dtype first, and ``y`` is the normalization of what is stored. The
    code for a row is that of :class:`FusedLayerNorm`, so add and norm as two steps give the same
    bits. The backward reads the sum, not its terms, and adds the gradient of ``s`` in the same
    pass: in 16 bits the two steps round once more there.

    Args:
        x: ``[..., *weight.shape]``, what a layer returned.
        residual: shape and device of ``x``; the stream that it is added to. It may be float32
            beside a 16-bit ``x``.
        weight: sizes of the dimensions that are normalized together. Any dtype but float64, and
            float64 for float64 ``x``.
        bias: like ``weight``, or None for zero.
        eps: added to the biased variance, in units of ``s ** 2``; ``>= 0``.
        prenorm: return the sum, too: the residual of the next layer.
        zero_centered_gamma: multiply by ``1 + weight``, as
            :func:`~apex.normalization.fused_layer_norm.fused_layer_norm_affine` does.

    Returns:
        ``y``, shape and dtype of ``x``; with ``prenorm`` ``(y, s)``, where ``s`` has the wider
        dtype of ``x`` and ``residual`` (float32 for float16 and bfloat16). Both contiguous.
        Autocast changes nothing here. Under amp's O1 and O4 all operands are cast to float32.

    Raises:
        TypeError: something is not floating point, or only some of them are float64.
        ValueError: shapes or devices do not match, or ``eps`` is negative.

    Source:
        Ba, Kiros & Hinton, *Layer Normalization*, 2016, equations 3 and 4.

    Example:
        >>> x, residual = torch.randn(2, 4, 64).unbind()
        >>> y, residual = fused_add_layer_norm(x, residual, torch.ones(64), prenorm=True)
        >>> y.shape
        torch.Size([4, 64])
    """
    if (answer := plainness(x, residual, weight, bias)) and are_right(
        x, residual, weight, bias, eps
    ):
        vectors = weight.contiguous(), bias if bias is None else bias.contiguous()
        given = *vectors, weight.numel(), eps, zero_centered_gamma
        y, total = add_layer_norm.plain[answer](x.contiguous(), residual.contiguous(), *given)
        return (y, total) if prenorm else y
    check_add_operands("fused_add_layer_norm", x, residual, weight, bias, eps)
    y, total = run(add_layer_norm, x, residual, (weight, bias), eps, zero_centered_gamma)
    return (y, total) if prenorm else y


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float | None = 1e-6,
    *,
    prenorm: bool = False,
    zero_centered_gamma: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""RMS normalization of a residual connection's sum, in one pass over memory.

    .. math::
        s = x + \mathrm{residual}, \qquad y = \frac{s}{\sqrt{\mathrm{mean}(s^2) + \epsilon}} \, w

    Arguments, results and errors are those of :func:`fused_add_layer_norm`, without a bias.
    ``eps=None`` is machine epsilon as with ``torch.nn.functional.rms_norm``: float32's, or
    float64's for float64 operands.

    Source:
        Zhang & Sennrich, *Root Mean Square Layer Normalization*, NeurIPS 2019.
    """
    eps = rms_eps(x, eps) if eps is None else eps
    if (answer := plainness(x, residual, weight)) and are_right(x, residual, weight, None, eps):
        given = weight.contiguous(), weight.numel(), eps, zero_centered_gamma
        y, total = add_rms_norm.plain[answer](x.contiguous(), residual.contiguous(), *given)
        return (y, total) if prenorm else y
    check_add_operands("fused_add_rms_norm", x, residual, weight, None, eps)
    y, total = run(add_rms_norm, x, residual, (weight,), eps, zero_centered_gamma)
    return (y, total) if prenorm else y
