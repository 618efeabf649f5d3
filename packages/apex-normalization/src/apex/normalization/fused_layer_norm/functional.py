"""Layer and RMS normalization as functions, with Apex's rules for autocast."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._shared.native.operands import are_exact, autocast_norm, statistics_dtype
from .._shared.native.plain import explain, plainness
from . import formulas
from .checks import as_shape, check_operands, check_recoverable, rms_eps

Shape = int | Sequence[int]
_plain_layer_norm, _plain_rms_norm = formulas.layer_norm.plain, formulas.rms_norm.plain


def run_layer_norm(
    name: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float,
    memory_efficient: bool,
    mixed: bool = False,
    zero_centered_gamma: bool = False,
    casts: bool = True,
) -> Tensor:
    """Check operands and run our kernels; ``name`` is the caller's.

    With ``mixed`` the result has the weight's dtype; with ``casts`` autocast casts operands first.
    """
    try:
        if (
            (answer := plainness(x, weight, bias))
            and weight is not None
            and not x.is_meta
            and weight.shape == normalized_shape
            and x.dim() > 1 == len(normalized_shape)
            and x.size(-1) == normalized_shape[0]
            and x.dtype is weight.dtype
            and type(eps) is float
            and 0.0 <= eps < math.inf
            and not memory_efficient
        ):
            return _plain_layer_norm[answer](
                x.contiguous(), weight, bias, normalized_shape[0], eps, zero_centered_gamma
            )
    except (AttributeError, RuntimeError):  # of None, and of the operator's checks
        if are_exact(weight, bias):
            explain(check_operands, name, x, weight, bias, normalized_shape, eps)
    if casts:
        x, weight, bias = autocast_norm(x, weight, bias)
    shape = as_shape(name, normalized_shape)
    check_operands(name, x, weight, bias, shape, eps)
    formula = formulas.layer_norm
    if memory_efficient:
        if _wants_gradients(x, weight, bias):
            check_recoverable(name, weight, zero_centered_gamma)
        formula = formulas.layer_norm_from_output
    dtype = formulas.result_dtype(x, weight, mixed)
    return formulas.run(formula, x, (weight, bias), shape, eps, zero_centered_gamma, dtype)


def run_rms_norm(
    name: str,
    x: Tensor,
    weight: Tensor | None,
    normalized_shape: Shape,
    eps: float | None,
    memory_efficient: bool,
    mixed: bool = False,
    zero_centered_gamma: bool = False,
    casts: bool = True,
) -> Tensor:
    """As :func:`run_layer_norm`, without a bias."""
    try:  # the same question again: a function for both would be a frame more in each call
        if (
            (answer := plainness(x, weight))
            and weight is not None
            and not x.is_meta
            and weight.shape == normalized_shape
            and x.dim() > 1 == len(normalized_shape)
            and x.size(-1) == normalized_shape[0]
            and x.dtype is weight.dtype
            and type(eps) is float
            and 0.0 <= eps < math.inf
            and not memory_efficient
        ):
            return _plain_rms_norm[answer](
                x.contiguous(), weight, normalized_shape[0], eps, zero_centered_gamma
            )
    except (AttributeError, RuntimeError):  # as above
        if are_exact(weight):
            explain(check_operands, name, x, weight, None, normalized_shape, eps)
    if casts:
        x, weight = autocast_norm(x, weight)
    shape, eps = as_shape(name, normalized_shape), rms_eps(x, eps)
    check_operands(name, x, weight, None, shape, eps)
    formula = formulas.rms_norm
    if memory_efficient:
        if _wants_gradients(x, weight):
            check_recoverable(name, weight, zero_centered_gamma)
        formula = formulas.rms_norm_from_output
    dtype = formulas.result_dtype(x, weight, mixed)
    return formulas.run(formula, x, (weight,), shape, eps, zero_centered_gamma, dtype)


def _wants_gradients(*tensors: Tensor | None) -> bool:
    """Whether there will be a backward."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
    *,
    zero_centered_gamma: bool = False,
) -> Tensor:
    r"""Layer normalization over the last dimensions, with weight and bias, in one pass.

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} \, w + b

    Mean and biased variance are computed in float32 (float64 for float64 input), from deviations
    from a number near the row's mean, so that rows far from zero keep their accuracy.

    The same kernels serve every size, so a row has the same bits in every batch.

    Args:
        input: ``[..., *normalized_shape]``, float64, float32, float16 or bfloat16, any layout
            (non-contiguous input is copied first).
        weight: ``normalized_shape``, of any of these dtypes; those that differ from the input's
            cost a cast, but for float32 beside a 16-bit input.
        bias: like ``weight``, in its dtype, or None for zero.
        normalized_shape: sizes of the dimensions that are normalized together; an int is one.
        eps: added to the variance, in units of ``input ** 2``; ``>= 0``.
        memory_efficient: keep the output instead of the input for the backward, which saves memory
            where the next layer keeps the output anyhow. The input is recovered as ``(output -
            bias) / weight``; gradients then carry the output's rounding, times ``|bias / weight|``
            where that is large. Where a weight is below ``eps``, the recovered ``xhat`` is too
            small. Where a weight is zero, ``xhat`` is lost: weights on the CPU then raise
            ValueError. Elsewhere, and in compiled code, such a weight gets no gradient.
        zero_centered_gamma: multiply by ``1 + weight`` instead of ``weight``, here and in what is
            said of weights above. The sum is formed in float32 (float64), so a bfloat16 weight of
            0.001 counts, which 1.001 in bfloat16 would not.

    Returns:
        Shape and dtype of ``input``, as from ``torch.nn.functional.layer_norm`` and ``rms_norm``;
        contiguous. With a 16-bit weight and a wider input, which torch's ``layer_norm`` refuses,
        the weight's dtype, as from Apex's ``manual_rms_norm`` and T5's norm: the 16-bit layer that
        follows takes it. Under autocast everything is cast to the autocast
        dtype first, which then is the result's (``torch.nn.functional.layer_norm`` returns
        float32). float64 stays float64. Under amp's O1 and O4 the rule is that of their lists for
        ``layer_norm``: everything is cast to float32, which is the result's.

    Raises:
        ValueError: shapes or devices do not match, ``eps`` is negative, or a weight is zero with
            ``memory_efficient`` (-1 with ``zero_centered_gamma``).
        TypeError: a dtype is not floating point, or the bias has another than the weight.
        RuntimeError: with ``memory_efficient``, the gradient is differentiated again.

    Source:
        Ba, Kiros & Hinton, *Layer Normalization*, 2016.
    """
    name, options = "fused_layer_norm_affine", (memory_efficient, False, zero_centered_gamma)
    return run_layer_norm(name, input, weight, bias, normalized_shape, eps, *options)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """:func:`fused_layer_norm_affine` without weight and bias.

    Here ``memory_efficient`` costs no accuracy beyond the output's rounding.
    """
    return run_layer_norm(
        "fused_layer_norm", input, None, None, normalized_shape, eps, memory_efficient
    )


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
    *,
    zero_centered_gamma: bool = False,
) -> Tensor:
    """:func:`fused_layer_norm_affine`, whose result has the weights' dtype, whatever the input's.

    Every pair of float64, float32, float16 and bfloat16 works; the result is rounded once. A 16-bit
    input with float32 weights is read and written directly; other pairs cost a cast.
    """
    name = "mixed_dtype_fused_layer_norm_affine"
    options = (memory_efficient, True, zero_centered_gamma)
    return run_layer_norm(name, input, weight, bias, normalized_shape, eps, *options)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float | None = 1e-6,
    memory_efficient: bool = False,
    *,
    zero_centered_gamma: bool = False,
) -> Tensor:
    r"""RMS normalization over the last dimensions, with a weight, in one pass.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \, w

    Args:
        eps: added to the mean square, in units of ``input ** 2``; ``>= 0``. None is machine epsilon
            as with ``torch.nn.functional.rms_norm``: float32's, or float64's for float64 input.

    Other arguments, results and errors are those of :func:`fused_layer_norm_affine`, without a
    bias. ``zero_centered_gamma=True`` makes it Gemma's norm.

    Source:
        Zhang & Sennrich, *Root Mean Square Layer Normalization*, NeurIPS 2019.
    """
    name, options = "fused_rms_norm_affine", (memory_efficient, False, zero_centered_gamma)
    return run_rms_norm(name, input, weight, normalized_shape, eps, *options)


def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float | None = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """:func:`fused_rms_norm_affine` without a weight."""
    return run_rms_norm("fused_rms_norm", input, None, normalized_shape, eps, memory_efficient)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float | None = 1e-6,
    memory_efficient: bool = False,
    *,
    zero_centered_gamma: bool = False,
) -> Tensor:
    """:func:`fused_rms_norm_affine`, whose result has the weight's dtype, whatever the input's."""
    name = "mixed_dtype_fused_rms_norm_affine"
    options = (memory_efficient, True, zero_centered_gamma)
    return run_rms_norm(name, input, weight, normalized_shape, eps, *options)


def manual_rms_norm(
    input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float | None
) -> Tensor:
    """RMS normalization in plain PyTorch: the reference, differentiable any number of times.

    Args:
        input: ``[..., *normalized_shape]``.
        normalized_shape: sizes of the dimensions that are normalized together; an int is one.
        weight: ``normalized_shape``, or None.
        eps: added to the mean square, which is computed in float32 (float64 if either is float64);
            None as for the fused functions.

    Returns:
        Shape of ``input``; dtype of ``weight``, or of ``input`` without one, as with the fused
        functions. With a 16-bit weight the quotient is rounded to its dtype first.
    """
    dims = tuple(range(-len(as_shape("manual_rms_norm", normalized_shape)), 0))
    out_dtype = input.dtype if weight is None else weight.dtype
    wide = input.to(statistics_dtype(torch.promote_types(input.dtype, out_dtype)))
    mean_square = wide.square().mean(dims, keepdim=True)
    normalized = wide * torch.rsqrt(mean_square + rms_eps(input, eps))
    normalized = normalized.to(out_dtype)
    return normalized if weight is None else weight * normalized


def supports_custom_op() -> bool:
    """Whether this torch has ``torch.library.custom_op``; every torch that Apex runs on does."""
    return hasattr(torch.library, "custom_op")
