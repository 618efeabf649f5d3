"""Tensors that cannot be permuted by themselves, because their memory is not theirs alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def overlapping(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that share memory with another view of it, or have an element at two places.

    The same view twice is no overlap: weights that are tied are one tensor.
    """
    found: list[Tensor] = []
    spans: list[tuple[Any, int, int, Any, Tensor]] = []
    for tensor in tensors:
        if not tensor.numel() or tensor.device.type == "meta":
            continue
        view = (tuple(tensor.shape), tensor.stride())
        if any(size > 1 and stride == 0 for size, stride in zip(*view, strict=True)):
            found.append(tensor)
        last = sum((size - 1) * stride for size, stride in zip(*view, strict=True))
        begin = tensor.data_ptr()
        end = begin + (last + 1) * tensor.element_size()
        spans.append((str(tensor.device), begin, end, view, tensor))
    spans.sort(key=lambda span: span[:3])
    reached: list[tuple[Any, int, int, Any, Tensor]] = []
    for span in spans:
        reached = [other for other in reached if other[0] == span[0] and other[2] > span[1]]
        unlike = [other for other in reached if other[1:4] != span[1:4]]
        found += [tensor for *_, tensor in (*unlike, *([span] if unlike else []))]
        reached.append(span)
    return found
