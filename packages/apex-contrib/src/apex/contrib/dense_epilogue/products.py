"""A dense layer's gradients, from torch's matrix products; and what a layer is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._shared.native.blaslt import DTYPES
from .._shared.native.operands import check_floating
from ..dense_blaslt import weight_and_bias_gradients

__all__ = ["as_matrix", "check_input", "check_layer", "fits", "linear_gradients"]


def as_matrix(x: Tensor) -> Tensor:
    """``x`` ``[..., columns]`` as ``[rows, columns]``."""
    dims = x.dim()
    if dims == 2:
        return x
    return x.flatten(0, -2) if dims > 2 else x.unsqueeze(0)


def linear_gradients(
    _: None, needs: Sequence[bool], dy: Tensor, saved: Sequence[Tensor], plain: bool = False
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of a layer's input, weight and bias; None for those that nobody needs.

    The backward of a :class:`~.._shared.native.composed.Composed`. ``saved`` begins with the input
    ``[..., in]`` and the weight; ``dy`` is ``[..., out]``.
    """
    x, weight, dx, dweight = saved[0], saved[1], None, None
    is_matrix = x.dim() == 2
    dy = dy if dy.dim() == 2 else as_matrix(dy)
    if needs[0]:
        dx = dy.mm(weight)
        dx = dx if is_matrix else dx.view(x.shape)
    if needs[1]:
        x = x if is_matrix else as_matrix(x)
        if needs[2] and x.dtype in DTYPES:
            both = weight_and_bias_gradients(dy, x, plain)
            if both is not None:
                return dx, *both
        dweight = dy.t().mm(x)
    return dx, dweight, dy.sum(0) if needs[2] else None


def check_input(name: str, input: Tensor) -> None:
    """Raise TypeError or ValueError unless ``input`` is rows of numbers."""
    check_floating(name, "input", input)
    if input.dim() == 0:
        raise ValueError(f"{name}: input must have shape [..., in_features], got a number.")


def fits(input: Tensor, columns: int, *layers: tuple[Any, Any]) -> bool:
    """Whether :func:`check_layer` has nothing to say of layers in a row: weights, biases or None.

    It takes 1 us for each.
    """
    dtype, device = input.dtype, input.device
    for weight, bias in layers:
        if not isinstance(weight, Tensor):
            return False
        shape = weight.shape
        if weight.dtype is not dtype or shape[1:] != (columns,) or weight.device != device:
            return False
        if bias is not None:
            if not isinstance(bias, Tensor) or bias.dtype is not dtype or bias.device != device:
                return False
            if bias.shape != shape[:1]:
                return False
        columns = shape[0]
    return True


def check_layer(
    name: str,
    input: Tensor,
    columns: int,
    weight: Tensor,
    bias: Tensor | None,
    names: tuple[str, str] = ("weight", "bias"),
) -> int:
    """Check a layer's parameters, and return how many columns its output has.

    Args:
        name: of the function.
        input: whose dtype and device the parameters must have.
        columns: of what the layer takes.
        weight, bias: ``[out, columns]``, ``[out]``.
        names: of these, for messages.

    Raises:
        TypeError: a dtype differs, or something is no tensor.
        ValueError: a shape or device does not fit.
    """
    if fits(input, columns, (weight, bias)):
        return weight.shape[0]
    _check_like(name, input, names[0], weight)
    shape = weight.shape
    if len(shape) != 2 or shape[1] != columns:
        raise ValueError(
            f"{name}: {names[0]} must have shape [out_features, {columns}], because rows of "
            f"{columns} numbers come to it; got {list(shape)}."
        )
    if bias is not None:
        _check_like(name, input, names[1], bias)
        if bias.shape != shape[:1]:
            raise ValueError(
                f"{name}: {names[1]} must have shape [{shape[0]}], one number for each row of "
                f"{names[0]} {list(shape)}; got {list(bias.shape)}."
            )
    return shape[0]


def _check_like(name: str, input: Tensor, argument: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != input.dtype:
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(
            f"{name}: {argument} is {got}, but input is {input.dtype}; cast one, or use autocast."
        )
    if tensor.device != input.device:
        raise ValueError(
            f"{name}: {argument} is on {tensor.device}, but input is on {input.device}; move one."
        )
