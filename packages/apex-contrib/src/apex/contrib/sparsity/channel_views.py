"""What views do with a dimension of channels: sizes as products, and rules of reshaping.

A trace has no numbers for sizes, only names. Products of names are enough to see that a view keeps
the channels as one dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from .channel_spaces import Channels, Size

SHAPE = "a number or a shape"  # of which nothing is known


@dataclass(frozen=True)
class ShapeOf:
    """The shape of a node of which nothing is known."""

    node: str

    def at(self, dim: Any) -> Any:
        return Size(1, ((self.node, dim),)) if isinstance(dim, int) and dim >= 0 else SHAPE


@dataclass(frozen=True)
class Held:
    """A tensor that the network holds, by its name, and a view of it.

    Attributes:
        tensor: what the network holds.
        seen: the view; ``tensor`` itself at first.
        dims: for each dimension of the view that of ``tensor``; None where all elements along it
            are the same.
    """

    name: str
    tensor: Tensor
    seen: Tensor
    dims: tuple[int | None, ...]

    @staticmethod
    def of(name: str, tensor: Tensor, seen: Tensor | None = None) -> Held | None:
        """None where the view lacks elements, or its dimensions are not those of the tensor."""
        seen = tensor if seen is None else seen
        dims: list[int | None] = []
        for size, stride in zip(seen.shape, seen.stride(), strict=True):
            alike = size == 1 or stride == 0
            same = [
                dim
                for dim in range(tensor.dim())
                if (tensor.shape[dim], tensor.stride(dim)) == (size, stride)
            ]
            if not alike and len(same) != 1:
                return None
            dims.append(None if alike else same[0])
        wide = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
        if sorted(dim for dim in dims if dim is not None) != wide:
            return None
        return Held(name, tensor, seen, tuple(dims))

    def viewed(self, method: str, arguments: Sequence[Any]) -> Held | None:
        """What a method that makes views makes of it; None where that is not known."""
        with torch.no_grad():
            try:
                seen = getattr(self.seen, method)(*arguments)
            except (TypeError, RuntimeError, IndexError):
                return None
        is_view = isinstance(seen, Tensor) and seen.data_ptr() == self.tensor.data_ptr()
        return Held.of(self.name, self.tensor, seen) if is_view else None


def is_number(value: Any) -> bool:
    """Whether a value is a size, a shape, or something like it: not a tensor."""
    return value == SHAPE or isinstance(value, (Size, ShapeOf, int, float, str, tuple))


def computed(function: Any, arguments: Sequence[Any]) -> Any:
    """What an operator makes of sizes and shapes."""
    if function.__name__ in ("mul", "imul") and all(isinstance(a, (Size, int)) for a in arguments):
        one, other = (a if isinstance(a, Size) else Size(a) for a in arguments)
        return one * other
    if function.__name__ == "getitem":
        whole, index = arguments
        if isinstance(whole, ShapeOf):
            return whole.at(index)
        if isinstance(whole, tuple) and isinstance(index, (int, slice)):
            return whole[index] if isinstance(index, slice) or index < len(whole) else SHAPE
    if function.__name__ == "add" and all(isinstance(a, tuple) for a in arguments):
        return (*arguments[0], *arguments[1])
    return SHAPE


def fresh(node: fx.Node, dims: int) -> tuple[Size, ...]:
    """Sizes of which nothing is known."""
    return tuple(Size(1, ((node.name, dim),)) for dim in range(dims))


def _product(sizes: Sequence[Size]) -> Size:
    result = Size(1)
    for size in sizes:
        result *= size
    return result


def reshaped(x: Channels, wanted: list[Any], size: int, node: fx.Node) -> Channels | None:
    """``x.view(*wanted)`` where the channels stay one dimension; None where that is not known.

    What lies before them has as many elements as before, or what lies behind them has.
    """
    if x.sizes is None or not all(isinstance(s, (int, Size)) or s == SHAPE for s in wanted):
        return None
    sizes: list[Size | None] = []
    for one in wanted:
        number = Size(one) if isinstance(one, int) and one >= 0 else one
        sizes.append(number if isinstance(number, Size) else None)
    at = len(x.sizes) + x.axis
    is_whole = x.sizes[at] == Size(size)  # not so behind a flatten that took the channels with it
    for place, one in enumerate(sizes):
        before, behind = sizes[:place], sizes[place + 1 :]
        same_before = None not in before and _product(before) == _product(x.sizes[:at])
        same_behind = None not in behind and _product(behind) == _product(x.sizes[at + 1 :])
        if (place, at, wanted[place:]) == (1, 1, [-1]) and same_before:
            return flattened(x, 1, -1, node)
        is_rest = wanted[place] == -1 and same_before and same_behind
        if is_rest or (is_whole and one == Size(size) and (same_before or same_behind)):
            sizes[place] = x.sizes[at]
            known = zip(sizes, fresh(node, len(sizes)), strict=True)
            filled = tuple(other if one is None else one for one, other in known)
            return replace(x, axis=place - len(sizes), sizes=filled)
    return None


def flattened(x: Channels, start: Any, end: Any, node: fx.Node) -> Channels | None:
    """Other dimensions as one; or all but the batch, the channels with them.

    There whoever reads more channels than there are freezes them.
    """
    if x.sizes is None or not all(isinstance(dim, int) for dim in (start, end)):
        return None
    dims = len(x.sizes)
    start, end, axis = start % dims, end % dims, dims + x.axis
    if start <= axis <= end:
        is_all = (start, end) == (1, dims - 1) and axis == 1
        return replace(x, axis=-1, sizes=(x.sizes[0], *fresh(node, 1))) if is_all else None
    sizes = (*x.sizes[:start], _product(x.sizes[start : end + 1]), *x.sizes[end + 1 :])
    return replace(x, axis=x.axis if end < axis else axis - len(sizes), sizes=sizes)


def permuted(x: Channels, order: Sequence[Any]) -> Channels | None:
    """Dimensions in another order."""
    if x.sizes is None or not all(isinstance(dim, int) for dim in order):
        return None
    dims = len(x.sizes)
    order = [dim % dims for dim in order]
    if sorted(order) != list(range(dims)):
        return None
    axis = order.index(dims + x.axis) - dims
    return replace(x, axis=axis, sizes=tuple(x.sizes[dim] for dim in order))


def transposed(x: Channels, one: Any, other: Any) -> Channels | None:
    """Two dimensions exchanged."""
    if not isinstance(one, int) or not isinstance(other, int):
        return None
    if x.sizes is None:  # from behind, where both are known
        moves = {one: other, other: one}
        return replace(x, axis=moves.get(x.axis, x.axis)) if max(one, other) < 0 else None
    order = list(range(len(x.sizes)))
    order[one], order[other] = order[other], order[one]
    return permuted(x, order)


def with_one(x: Channels, dim: Any) -> Channels | None:
    """A new dimension of size 1."""
    if x.sizes is None or not isinstance(dim, int):
        return None
    dims = len(x.sizes) + 1
    place, axis = dim % dims, dims - 1 + x.axis
    sizes = (*x.sizes[:place], Size(1), *x.sizes[place:])
    return replace(x, axis=(axis + (place <= axis)) - dims, sizes=sizes)


def without(x: Channels, dim: Any) -> Channels | None:
    """A dimension left out: squeezed, or indexed by a number. The channels stay."""
    if x.sizes is None or not isinstance(dim, int):
        return None
    dims = len(x.sizes)
    place, axis = dim % dims, dims + x.axis
    if place == axis:
        return None
    sizes = (*x.sizes[:place], *x.sizes[place + 1 :])
    return replace(x, axis=(axis - (place < axis)) - len(sizes), sizes=sizes)


def indexed(x: Channels, index: Any, node: fx.Node) -> Channels | None:
    """``x[index]`` of numbers, slices, None and ``...`` that leave the channels as they are."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if x.sizes is None or parts.count(...) > 1:
        return None
    missing = len(x.sizes) - sum(part is not None and part is not ... for part in parts)
    place = parts.index(...) if ... in parts else len(parts)
    parts[place : place + 1] = [slice(None)] * missing
    result, dim = x, 0
    for part in parts:
        at = len(result.sizes or ()) + result.axis
        if part is None:
            made = with_one(result, dim)
        elif part == slice(None):
            made = result
        elif isinstance(part, slice) and dim != at:
            made = replace(result, sizes=_with(result, dim, fresh(node, dim + 1)[dim]))
        elif isinstance(part, int) or part == SHAPE or isinstance(part, Size):
            made = without(result, dim)
        else:
            made = None
        if made is None:
            return None
        dim += part is None or isinstance(part, slice)
        result = made
    return result


def _with(x: Channels, dim: int, size: Size) -> tuple[Size, ...]:
    sizes = list(x.sizes or ())
    sizes[dim] = size
    return tuple(sizes)


def met(values: Sequence[Channels | Held], wide: Channels, node: fx.Node) -> Channels | None:
    """The dimensions of what is computed from tensors that meet; None where they are not known."""
    if wide.sizes is None:
        return wide
    sizes = list(wide.sizes)
    for value in values:
        if isinstance(value, Held):
            other: Sequence[Size] = [Size(size) for size in value.seen.shape]
        else:
            other = value.sizes or ()
        if len(other) > len(sizes):
            return None
        for behind in range(1, len(other) + 1):
            if other[-behind] not in (sizes[-behind], Size(1)):
                sizes[-behind] = fresh(node, len(sizes))[-behind]
    sizes[wide.axis] = wide.sizes[wide.axis]
    return replace(wide, sizes=tuple(sizes))
