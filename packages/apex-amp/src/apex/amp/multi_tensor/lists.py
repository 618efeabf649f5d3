"""Brings arbitrary lists of gradients into the form the ops take: one dtype, one device, dense."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._shared.native.writes import call_counted
from ..masters.sharding import local_tensors
from . import axpby, scale, scale_

# Returns the int32 [1] tensor on a device that is set to 1 where an inf or NaN is found.
FlagOf = Callable[[torch.device], Tensor]
_DTYPE = operator.attrgetter("dtype")
Copies = list[tuple[Tensor, Tensor]]  # (output, dense copy that was written instead)


def scale_lists(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], flag_of: FlagOf, factor: float
) -> None:
    """``outputs[i] = inputs[i] * factor`` with :func:`~apex.amp.multi_tensor.scale`.

    Args:
        inputs, outputs: lists of one length, which may be one list; shapes agree by index. dtypes
            and devices may differ between indices, dtypes and memory layouts also within one. Of
            DTensors the shards of this process are meant.
        flag_of: where inf and NaN in ``inputs`` are noted.
        factor: see above.
    """
    copies: Copies = []
    is_in_place = inputs is outputs
    outputs = local_tensors(outputs)
    if is_in_place:
        for (device, _), (tensors,) in _grouped([outputs], copies).items():
            call_counted(scale_, tensors, flag_of(device), factor)
    else:
        for (device, *_), (outs, xs) in _grouped([outputs, local_tensors(inputs)], copies).items():
            call_counted(scale, xs, outs, flag_of(device), factor)
    if copies:
        _copy_back(copies)


def axpby_lists(
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    outputs: Sequence[Tensor],
    flag_of: FlagOf,
    a: float,
    b: float,
) -> None:
    """``outputs[i] = a * xs[i] + b * ys[i]`` with :func:`~apex.amp.multi_tensor.axpby`.

    Args:
        xs, ys, outputs: as for :func:`scale_lists`; ``ys[i]`` has the dtype of ``outputs[i]``.
        flag_of: where inf and NaN in ``xs`` are noted.
        a, b: factors.
    """
    copies: Copies = []
    lists = [local_tensors(tensors) for tensors in (outputs, xs, ys)]
    for (device, *_), (outs, xs_, ys_) in _grouped(lists, copies).items():
        call_counted(axpby, xs_, ys_, outs, flag_of(device), a, b, 0)
    _copy_back(copies)


def _grouped(
    lists: list[Sequence[Tensor]], copies: Copies
) -> dict[tuple, tuple[Sequence[Tensor], ...]]:
    """Split lists by (device, dtype of each list) and replace tensors with gaps by dense copies.

    The first list is written to; what had to be copied of it is added to ``copies``.
    """
    if len(set(map(len, lists))) != 1:
        raise ValueError(f"lists of gradients differ in length: {[len(t) for t in lists]}.")
    if not lists[0]:
        return {}
    if _is_uniform(lists):
        first = next(zip(*lists, strict=True))
        return {(first[0].device, *map(_DTYPE, first)): tuple(lists)}
    groups: dict[tuple, tuple[list[Tensor], ...]] = {}
    for row in zip(*lists, strict=True):
        key = (row[0].device, *(tensor.dtype for tensor in row))
        columns = groups.setdefault(key, tuple([] for _ in row))
        if not all(tensor.is_contiguous() for tensor in row):
            row = _same_layout(row, copies)
        for column, tensor in zip(columns, row, strict=True):
            column.append(tensor)
    return groups


def _is_uniform(lists: list[Sequence[Tensor]]) -> bool:
    """Whether the lists can go to an op as they are: the usual case, so its loops are C's."""
    devices = set(map(Tensor.get_device, itertools.chain.from_iterable(lists)))
    if len(devices) != 1:  # the index: -1 is the CPU, and there is one kind of accelerator
        return False
    for tensors in lists:
        if len(set(map(_DTYPE, tensors))) != 1:
            return False
    return all(map(Tensor.is_contiguous, itertools.chain.from_iterable(lists)))


def _same_layout(row: tuple[Tensor, ...], copies: Copies) -> tuple[Tensor, ...]:
    """Tensors of equal shape in one dense layout: that of the output, the first, if it is dense."""
    output = row[0]
    # preserve_format keeps the strides of a tensor without gaps or overlaps, and of no other.
    dense = torch.empty_like(output)
    if dense.stride() == output.stride():
        dense = output
    else:
        copies.append((output, dense))
    replaced = {id(output): dense}
    result = []
    for tensor in row:
        if id(tensor) not in replaced:
            has_layout = tensor.stride() == dense.stride()
            replaced[id(tensor)] = (
                tensor if has_layout else torch.empty_like(dense, dtype=tensor.dtype)
            )
        if replaced[id(tensor)] is not tensor:
            replaced[id(tensor)].copy_(tensor)
        result.append(replaced[id(tensor)])
    return tuple(result)


def _copy_back(copies: Copies) -> None:
    for output, copy in copies:
        output.copy_(copy)
