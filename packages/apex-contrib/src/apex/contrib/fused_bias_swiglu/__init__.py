"""SwiGLU of an MLP, with the bias of the layer before it, in one pass in each direction."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .._ops import library
from .._shared.native.formula import Formula
from .._shared.native.operands import autocast, check_floating, exact
from .._shared.native.plain import explain, plainness

__all__ = ["decompositions", "fused_bias_swiglu"]


@library.define("fused_bias_swiglu_forward(Tensor input, Tensor? bias) -> Tensor")
def fused_bias_swiglu_forward(input: Tensor, bias: Tensor | None) -> Tensor:
    """``silu(a) * b`` of the halves of ``input + bias``: contiguous ``[..., 2H]`` to ``[..., H]``.

    Without ``bias`` it is zero; it has the input's dtype.
    """
    return input.new_empty([*input.shape[:-1], input.shape[-1] // 2])


@library.define(
    "fused_bias_swiglu_backward(Tensor dy, Tensor input, Tensor? bias, bool bias_grad)"
    " -> (Tensor dinput, Tensor dbias)"
)
def fused_bias_swiglu_backward(
    dy: Tensor, input: Tensor, bias: Tensor | None, bias_grad: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`fused_bias_swiglu_forward`.

    ``dinput`` is like ``input``; ``dbias``, ``[2H]``, is its sum over rows, added in float32 at
    least, or ``[0]`` without ``bias_grad``. ``dy`` has any layout.
    """
    return torch.empty_like(input), input.new_empty([input.shape[-1] if bias_grad else 0])


def _reference(input: Tensor, bias: Tensor | None = None) -> Tensor:
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    a, b = (wide if bias is None else wide + bias.to(wide.dtype)).chunk(2, -1)
    return (F.silu(a) * b).to(input.dtype)


_swiglu = Formula(
    "fused_bias_swiglu",
    fused_bias_swiglu_forward,
    fused_bias_swiglu_backward,
    _reference,
    saves=("input", "bias"),
    grads=("input", "bias"),
    rows={"input": 1},
    shared=("bias",),
)
decompositions = _swiglu.decompositions
"""The operators in ATen's, for ``ExportedProgram.run_decompositions``: call it."""


def fused_bias_swiglu(input: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Add a bias, and multiply one half of each row with SiLU of the other.

    .. math:: a, b = \mathrm{halves}(x + \mathrm{bias}), \qquad y = \frac{a}{1 + e^{-a}} \, b

    Args:
        input: ``[..., 2H]``, ``H > 0``; float64, float32, float16 or bfloat16; any layout. It is
            copied if it is not contiguous.
        bias: ``[2H]``, in the input's dtype and on its device, or None for zero.

    Returns:
        ``[..., H]``, dtype and device of ``input``, contiguous. 16-bit rows are computed in float32
        and rounded once. Under autocast both are cast to its dtype first, but for float64.

    Raises:
        TypeError: a dtype is not one of those above, or the two differ.
        ValueError: shapes or devices do not fit.

    Source:
        Shazeer, *GLU Variants Improve Transformer*, 2020, section 2.

    Example:
        >>> hidden = torch.nn.functional.linear(torch.randn(4, 8), torch.randn(32, 8))
        >>> fused_bias_swiglu(hidden, torch.zeros(32)).shape
        torch.Size([4, 16])
    """
    try:
        if (
            (answer := plainness(input, bias))
            and not input.is_meta
            and (bias is None or bias.shape == input.shape[-1:])
        ):
            bias = bias if bias is None else bias.contiguous()
            return _swiglu.plain[answer](input.contiguous(), bias)
    except (AttributeError, RuntimeError):  # of None, and of the operator's checks
        explain(check_operands, input, bias)
    input, bias = autocast(input, bias)
    check_operands(input, bias)
    return _swiglu(exact(input), None if bias is None else exact(bias))


def check_operands(input: Tensor, bias: Tensor | None) -> None:
    """Raise TypeError or ValueError for operands that the kernels do not take."""
    name = "fused_bias_swiglu"
    check_floating(name, "input", input)
    if input.dim() == 0 or input.shape[-1] == 0 or input.shape[-1] % 2:
        raise ValueError(
            f"{name}: input must have shape [..., 2H] with H > 0, got {list(input.shape)}."
        )
    if bias is None:
        return
    check_floating(name, "bias", bias)
    if bias.dtype != input.dtype:
        raise TypeError(f"{name}: bias is {bias.dtype}, but input is {input.dtype}; cast one.")
    if bias.shape != input.shape[-1:] or bias.device != input.device:
        raise ValueError(
            f"{name}: bias must have shape [{input.shape[-1]}] on {input.device}, as the rows of "
            f"input {list(input.shape)}; got {list(bias.shape)} on {bias.device}."
        )
