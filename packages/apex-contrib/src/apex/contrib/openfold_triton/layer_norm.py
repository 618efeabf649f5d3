"""Layer normalization, under the name that OpenFold's kernels have in Apex."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._shared.native.named_functions import NamedFunction
from .._shared.native.operands import as_rows, as_vector, autocast_norm, check_floating, exact
from ..layer_norm.fast_layer_norm import formula

__all__ = ["LayerNormSmallShapeOptImpl", "decompositions"]

_NAME = "LayerNormSmallShapeOptImpl"


def decompositions() -> dict[Any, Any]:
    """The operators in ATen's, for ``ExportedProgram.run_decompositions``."""
    return formula.layer_norm.decompositions()


class LayerNormSmallShapeOptImpl(NamedFunction):
    r"""Layer normalization over the last dimensions, as Apex's class of this name; call ``apply``.

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot w + b

    The name is Apex's, where the class is tuned for small rows. Here rows have any length.
    """

    @staticmethod
    def apply(
        inputs: Tensor,
        normalized_shape: Sequence[int] | int,
        weight: Tensor,
        bias: Tensor,
        eps: float = 1e-05,
    ) -> Tensor:
        """Normalize ``inputs``.

        Args:
            inputs: ``[..., *normalized_shape]``; float64, float32, float16 or bfloat16; any layout.
            normalized_shape: the last dimensions, which are normalized together; an int is one.
            weight, bias: of this shape, of any of these dtypes.
            eps: added to the biased variance, ``>= 0``.

        Returns:
            Shape and dtype of ``inputs``, contiguous; computed in float32 at least. Gradients of
            weight and bias are sums in float32 at least. Autocast casts all tensors to its dtype
            first, except float64; amp's O1 and O4 cast 16 bits to float32.

        Raises:
            TypeError: a tensor is of another dtype, or none.
            ValueError: shapes or devices do not fit, a row has no element, or ``eps`` is negative.

        Source:
            Ba, Kiros & Hinton 2016, "Layer normalization", https://arxiv.org/abs/1607.06450

        Example:
            >>> x, weight, bias = torch.randn(2, 5, 8), torch.ones(8), torch.zeros(8)
            >>> LayerNormSmallShapeOptImpl.apply(x, (8,), weight, bias).shape
            torch.Size([2, 5, 8])
        """
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        inputs, weight, bias = autocast_norm(inputs, weight, bias)
        _check(inputs, tuple(shape), weight, bias, eps)
        dtype = torch.promote_types(inputs.dtype, torch.promote_types(weight.dtype, bias.dtype))
        rows = exact(as_rows(inputs, len(shape)), dtype)
        vectors = as_vector(weight, dtype), as_vector(bias, dtype)
        y = formula.layer_norm(rows, *vectors, float(eps), False)
        y = y if y.shape == inputs.shape else y.reshape(inputs.shape)
        return y if y.dtype == inputs.dtype else y.to(inputs.dtype)


def _check(
    inputs: Tensor, shape: tuple[int, ...], weight: Tensor, bias: Tensor, eps: float
) -> None:
    for argument, tensor in (("inputs", inputs), ("weight", weight), ("bias", bias)):
        check_floating(_NAME, argument, tensor)
    is_fit = shape and math.prod(shape) and inputs.shape[-len(shape) :] == shape
    if not is_fit or not weight.shape == bias.shape == shape:
        raise ValueError(
            f"{_NAME}: normalized_shape must be the last dimensions of inputs, not 0, and "
            f"the shape of weight and bias; got {list(shape)}, inputs {list(inputs.shape)}, "
            f"weight {list(weight.shape)} and bias {list(bias.shape)}."
        )
    if not eps >= 0:
        raise ValueError(f"{_NAME}: eps must not be negative, got {eps}.")
    if not inputs.device == weight.device == bias.device:
        raise ValueError(
            f"{_NAME}: inputs are on {inputs.device}, but weight on {weight.device} and bias on "
            f"{bias.device}; move them to one device."
        )
