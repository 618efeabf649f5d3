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
from apex.normalization.fused_layer_norm.checks import as_shape as _as_shape
from apex.normalization.fused_layer_norm.checks import check_operands as _check_operands
from apex.normalization.fused_layer_norm.compute import gradients as _gradients
from apex.normalization.fused_layer_norm.compute import normalize as _normalize
from apex.normalization.fused_layer_norm.formulas import LAYER_NORM as _LAYER_NORM
from apex.normalization.fused_layer_norm.formulas import RMS_NORM as _RMS_NORM

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
    return list(_normalize("forward", _LAYER_NORM, input, (None, None), normalized_shape, eps))


@torch.no_grad()
def forward_affine(
    input: Tensor, normalized_shape: _Shape, gamma: Tensor, beta: Tensor, eps: float
) -> list[Tensor]:
    """Return ``[output, mean, invvar]``; all tensors of one dtype."""
    return list(
        _normalize("forward_affine", _LAYER_NORM, input, (gamma, beta), normalized_shape, eps)
    )


@torch.no_grad()
def forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: _Shape, gamma: Tensor, beta: Tensor, eps: float
) -> list[Tensor]:
    """Return ``[output, mean, invvar]``; the output has gamma's dtype, whatever the input's."""
    given = input, (gamma, beta), normalized_shape, eps, True
    return list(_normalize("forward_affine_mixed_dtypes", _LAYER_NORM, *given))


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
    given = input_or_output, (None, None), normalized_shape, eps, memory_efficient
    return _checked_gradients("backward", _LAYER_NORM, dout, (mean, invvar), *given)[0]


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
    given = input_or_output, (gamma, beta), normalized_shape, eps, memory_efficient
    return _checked_gradients("backward_affine", _LAYER_NORM, dout, (mean, invvar), *given)


@torch.no_grad()
def rms_forward(input: Tensor, normalized_shape: _Shape, eps: float) -> list[Tensor]:
    """Return ``[output, invvar]`` of RMS normalization without a weight."""
    return list(_normalize("rms_forward", _RMS_NORM, input, (None,), normalized_shape, eps))


@torch.no_grad()
def rms_forward_affine(
    input: Tensor, normalized_shape: _Shape, gamma: Tensor, eps: float
) -> list[Tensor]:
    """Return ``[output, invvar]``; both tensors of one dtype."""
    return list(_normalize("rms_forward_affine", _RMS_NORM, input, (gamma,), normalized_shape, eps))


@torch.no_grad()
def rms_forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: _Shape, gamma: Tensor, eps: float
) -> list[Tensor]:
    """Return ``[output, invvar]``; the output has gamma's dtype, whatever the input's."""
    given = input, (gamma,), normalized_shape, eps, True
    return list(_normalize("rms_forward_affine_mixed_dtypes", _RMS_NORM, *given))


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
    given = input_or_output, (None,), normalized_shape, eps, memory_efficient
    return _checked_gradients("rms_backward", _RMS_NORM, dout, (invvar,), *given)[0]


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
    given = input_or_output, (gamma,), normalized_shape, eps, memory_efficient
    return _checked_gradients("rms_backward_affine", _RMS_NORM, dout, (invvar,), *given)


def _checked_gradients(name, norm, dout, statistics, saved, weights, shape, eps, efficient):
    _check_operands(name, saved, weights, _as_shape(name, shape), eps, mixed=True)
    if dout.shape != saved.shape:
        raise ValueError(
            f"{name}: dout must have the shape of input_or_output, which is {list(saved.shape)}; "
            f"got {list(dout.shape)}."
        )
    is_affine = weights[0] is not None
    expected = weights[0].dtype if is_affine else saved.dtype
    if dout.dtype != expected:
        raise TypeError(
            f"{name}: dout must have the forward's output's dtype, {expected}; got {dout.dtype}."
        )
    given = saved, weights, shape, eps, efficient, is_affine
    return list(_gradients(norm, dout, statistics, *given))
