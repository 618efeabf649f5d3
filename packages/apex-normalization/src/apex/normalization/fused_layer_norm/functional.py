"""Layer and RMS normalization as functions, with Apex's rules for autocast."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._shared.native.operands import are_exact, autocast_norm, statistics_dtype
from .._shared.native.plain import explain, plainness
from .checks import Shape, as_shape, check_operands, check_recoverable, rms_eps
from .formulas import LAYER_NORM, RMS_NORM, Norm, result_dtype, run


def run_norm(
    name: str,
    norm: Norm,
    x: Tensor,
    weights: Sequence[Tensor | None],
    normalized_shape: Shape,
    eps: float | None,
    memory_efficient: bool,
    mixed: bool = False,
    zero_centered_gamma: bool = False,
    casts: bool = True,
) -> Tensor:
    """Check operands and run our kernels; ``name`` is the caller's.

    ``weights`` are weight and bias of a layer norm, or the weight of an RMS norm. With ``mixed``
    the result has the weight's dtype; with ``casts`` autocast casts operands first.
    """
    weight = weights[0]
    try:
        if (
            (answer := plainness(x, *weights))
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
            return norm.from_input.plain[answer](
                x.contiguous(), *weights, normalized_shape[0], eps, zero_centered_gamma
            )
    except (AttributeError, RuntimeError):  # of None, and of the operator's checks
        if are_exact(*weights):
            explain(check_operands, name, x, weights, normalized_shape, eps)
    if casts:
        x, *weights = autocast_norm(x, *weights)
    shape = as_shape(name, normalized_shape)
    eps = rms_eps(x, eps) if norm.name == "rms_norm" else eps  # torch 2.10 traces no `is`
    check_operands(name, x, weights, shape, eps)
    if memory_efficient and _wants_gradients(x, *weights):
        check_recoverable(name, weights[0], zero_centered_gamma)
    formula = norm.from_output if memory_efficient else norm.from_input
    dtype = result_dtype(x, weights[0], mixed)
    return run(formula, x, weights, shape, eps, zero_centered_gamma, dtype)


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
    name, weights, centered = "fused_layer_norm_affine", (weight, bias), zero_centered_gamma
    return run_norm(
        name, LAYER_NORM, input, weights, normalized_shape, eps, memory_efficient, False, centered
    )


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """:func:`fused_layer_norm_affine` without weight and bias.

    Here ``memory_efficient`` costs no accuracy beyond the output's rounding.
    """
    return run_norm(
        "fused_layer_norm", LAYER_NORM, input, (None, None), normalized_shape, eps, memory_efficient
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
    name, weights, centered = (
        "mixed_dtype_fused_layer_norm_affine",
        (weight, bias),
        zero_centered_gamma,
    )
    return run_norm(
        name, LAYER_NORM, input, weights, normalized_shape, eps, memory_efficient, True, centered
    )


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
    name, weights, centered = "fused_rms_norm_affine", (weight,), zero_centered_gamma
    return run_norm(
        name, RMS_NORM, input, weights, normalized_shape, eps, memory_efficient, False, centered
    )


def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float | None = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """:func:`fused_rms_norm_affine` without a weight."""
    return run_norm(
        "fused_rms_norm", RMS_NORM, input, (None,), normalized_shape, eps, memory_efficient
    )


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
    name, weights, centered = "mixed_dtype_fused_rms_norm_affine", (weight,), zero_centered_gamma
    return run_norm(
        name, RMS_NORM, input, weights, normalized_shape, eps, memory_efficient, True, centered
    )


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
