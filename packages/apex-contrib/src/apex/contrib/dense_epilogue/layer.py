"""A dense layer whose backward no autocast changes, as ``torch.nn.functional.linear`` has it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from .._shared.native.composed import Composed
from .products import as_matrix, linear_gradients

__all__ = ["dense", "dense_backward", "dense_forward"]


def _plain(_: None, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(input, weight, bias)


def dense_forward(_: None, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """The output ``[..., out]`` of input ``[..., in]``, weight ``[out, in]`` and bias or None."""
    return (F.linear(x, weight, bias),)


def dense_backward(
    _: None, needs: Sequence[bool], dy: Tensor, saved: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Gradients of input, weight and bias where ``needs`` says so; ``saved`` is the first two."""
    return linear_gradients(needs, as_matrix(dy), saved[0], saved[1])


dense = Composed("fused_dense_function", dense_forward, dense_backward, _plain)
"""The layer. Arguments: None, input ``[..., in]``, weight ``[out, in]``, bias ``[out]`` or None."""
