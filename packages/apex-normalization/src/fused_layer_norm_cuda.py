"""Apex's normalization kernels under their old module name, with positional arguments.

``mean`` and ``invvar``, which is ``1 / sqrt(var + eps)``, are float32 (float64 for float64 input),
``[rows]``. ``dout`` has the shape and dtype of the forward's output. The backwards take the input,
or the output if ``memory_efficient`` (``mean`` may then be None), and ``dx`` has that one's dtype.
Unlike their predecessors these functions take CPU tensors, too.

Importing this module raises ImportError where its kernels cannot run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex.normalization._ops import library as _library
from apex.normalization.fused_layer_norm import compute as _compute
from apex.normalization.fused_layer_norm.checks import as_shape as _as_shape
from apex.normalization.fused_layer_norm.checks import check_operands as _check_operands

_device_type = "cuda" if torch.cuda.is_available() else "cpu"
_library.require_for_import(__name__, "fused_layer_norm", device_type=_device_type)

__all__ = [
    "backward",
    "backward_affine",
    "forward",
    "forward_affine",
    "forward_affine_mixed_dtypes",
    "rms_backward",
    "rms_backward_affine",
    "rms_forward",
    "rms_forward_affine",
    "rms_forward_affine_mixed_dtypes",
]

_Shape = Sequence[int]


@torch.no_grad()
def forward(input: Tensor, normalized_shape: _Shape, eps: float) -> list[Tensor]:
    """Return ``[output, mean, invvar]`` of layer normalization without weight and bias."""
    return list(_compute.layer_norm("forward", input, None, None, normalized_shape, eps, False))


@torch.no_grad()
def forward_affine(
    input: Tensor, normalized_shape: _Shape, gamma: Tensor, beta: Tensor, eps: float
) -> list[Tensor]:
    """Return ``[output, mean, invvar]``; all tensors of one dtype."""
    return list(
        _compute.layer_norm("forward_affine", input, gamma, beta, normalized_shape, eps, False)
    )


@torch.no_grad()
def forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: _Shape, gamma: Tensor, beta: Tensor, eps: float
) -> list[Tensor]:
    """Return ``[output, mean, invvar]``; the output has gamma's dtype, whatever the input's."""
    name = "forward_affine_mixed_dtypes"
    results = _compute.layer_norm(name, input, gamma, beta, normalized_shape, eps, True)
    return list(_compute.in_input_dtype(input, *results))


@torch.no_grad()
def backward(
    dout: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: _Shape,
    eps: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Return dx of :func:`forward`."""
    return _layer_norm_backward(
        "backward",
        dout,
        mean,
        invvar,
        input_or_output,
        normalized_shape,
        None,
        None,
        eps,
        memory_efficient,
    )[0]


@torch.no_grad()
def backward_affine(
    dout: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: _Shape,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
    memory_efficient: bool = False,
) -> list[Tensor]:
    """Return ``[dx, dgamma, dbeta]`` of :func:`forward_affine` or its mixed-dtype variant."""
    return _layer_norm_backward(
        "backward_affine",
        dout,
        mean,
        invvar,
        input_or_output,
        normalized_shape,
        gamma,
        beta,
        eps,
        memory_efficient,
    )


@torch.no_grad()
def rms_forward(input: Tensor, normalized_shape: _Shape, eps: float) -> list[Tensor]:
    """Return ``[output, invvar]`` of RMS normalization without a weight."""
    return list(_compute.rms_norm("rms_forward", input, None, normalized_shape, eps, False))


@torch.no_grad()
def rms_forward_affine(
    input: Tensor, normalized_shape: _Shape, gamma: Tensor, eps: float
) -> list[Tensor]:
    """Return ``[output, invvar]``; both tensors of one dtype."""
    return list(_compute.rms_norm("rms_forward_affine", input, gamma, normalized_shape, eps, False))


@torch.no_grad()
def rms_forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: _Shape, gamma: Tensor, eps: float
) -> list[Tensor]:
    """Return ``[output, invvar]``; the output has gamma's dtype, whatever the input's."""
    name = "rms_forward_affine_mixed_dtypes"
    results = _compute.rms_norm(name, input, gamma, normalized_shape, eps, True)
    return list(_compute.in_input_dtype(input, *results))


@torch.no_grad()
def rms_backward(
    dout: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: _Shape,
    eps: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Return dx of :func:`rms_forward`."""
    return _rms_norm_backward(
        "rms_backward", dout, invvar, input_or_output, normalized_shape, None, eps, memory_efficient
    )[0]


@torch.no_grad()
def rms_backward_affine(
    dout: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: _Shape,
    gamma: Tensor,
    eps: float,
    memory_efficient: bool = False,
) -> list[Tensor]:
    """Return ``[dx, dgamma]`` of :func:`rms_forward_affine` or its mixed-dtype variant."""
    return _rms_norm_backward(
        "rms_backward_affine",
        dout,
        invvar,
        input_or_output,
        normalized_shape,
        gamma,
        eps,
        memory_efficient,
    )


def _layer_norm_backward(name, dout, mean, invvar, saved, shape, gamma, beta, eps, efficient):
    _check_backward_operands(name, dout, saved, gamma, beta, shape, eps)
    mean, invvar = _compute.as_statistics(saved.dtype, dout.dtype, efficient, mean, invvar)
    return list(
        _compute.layer_norm_gradients(
            dout,
            saved,
            gamma,
            beta,
            mean,
            invvar,
            shape,
            eps,
            saved.dtype,
            efficient,
            gamma is not None,
        )
    )


def _rms_norm_backward(name, dout, invvar, saved, shape, gamma, eps, efficient):
    _check_backward_operands(name, dout, saved, gamma, None, shape, eps)
    (invvar,) = _compute.as_statistics(saved.dtype, dout.dtype, efficient, invvar)
    return list(
        _compute.rms_norm_gradients(
            dout, saved, gamma, invvar, shape, eps, saved.dtype, efficient, gamma is not None
        )
    )


def _check_backward_operands(name, dout, saved, gamma, beta, shape, eps):
    _check_operands(name, saved, gamma, beta, _as_shape(name, shape), eps, mixed=True)
    if dout.shape != saved.shape:
        raise ValueError(
            f"{name}: dout must have the shape of input_or_output, which is {list(saved.shape)}; "
            f"got {list(dout.shape)}."
        )
    expected = (saved if gamma is None else gamma).dtype
    if dout.dtype != expected:
        raise TypeError(
            f"{name}: dout must have the forward's output's dtype, {expected}; got {dout.dtype}."
        )
