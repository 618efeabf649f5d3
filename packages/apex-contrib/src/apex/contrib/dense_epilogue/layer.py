"""A dense layer whose backward no autocast changes, as ``torch.nn.functional.linear`` has it."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from .._shared.native.composed import Composed
from .products import linear_gradients

__all__ = ["dense", "dense_forward"]


def _plain(_: None, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(input, weight, bias)


def dense_forward(_: None, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """The output ``[..., out]`` of input ``[..., in]``, weight ``[out, in]`` and bias or None."""
    return (F.linear(x, weight, bias),)


dense = Composed("fused_dense_function", dense_forward, linear_gradients, _plain, output=F.linear)
"""The layer. Arguments: None, input ``[..., in]``, weight ``[out, in]``, bias ``[out]`` or None."""
