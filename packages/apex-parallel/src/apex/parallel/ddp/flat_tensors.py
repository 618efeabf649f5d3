"""Flat buffers: join tensors into one, run a collective on it, and split it again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

HALF_FLOAT_DOUBLE_BFLOAT16 = (torch.float16, torch.float32, torch.float64, torch.bfloat16)


def flatten(bucket: Sequence[Tensor]) -> Tensor:
    """Join tensors into one new 1-D tensor, in order, each in its logical (row-major) order.

    Args:
        bucket: at least one tensor; any shapes and strides, one dtype and device.

    Returns:
        A tensor of shape ``[sum of numel]``, of the bucket's dtype, without a gradient.

    Raises:
        ValueError: the bucket is empty.
        TypeError: the dtypes differ (use :func:`split_by_type` first).
        RuntimeError: the devices differ, or a tensor is sparse.
    """
    with torch.no_grad():
        return join(bucket)


def join(bucket: Sequence[Tensor]) -> Tensor:
    """:func:`flatten`, through which gradients flow, if enabled; ``apex_C.flatten``."""
    if len(bucket) == 0:
        raise ValueError("flatten: bucket is empty; expected at least one tensor.")
    if len({tensor.dtype for tensor in bucket}) > 1:  # torch would promote them
        dtype = bucket[0].dtype
        position = next(i for i, tensor in enumerate(bucket) if tensor.dtype != dtype)
        raise TypeError(
            f"flatten: bucket[{position}] is {bucket[position].dtype}, but bucket[0] is "
            f"{dtype}. Group the tensors with split_by_type first."
        )
    if len(bucket) == 1:  # torch would return a view of it
        return bucket[0].clone(memory_format=torch.contiguous_format).view(-1)
    return _flatten_dense_tensors(bucket)


def unflatten(coalesced: Tensor, bucket: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``coalesced`` with the shapes of ``bucket``; the inverse of :func:`flatten`.

    Args:
        coalesced: 1-D, at least ``sum of numel`` of ``bucket`` long.
        bucket: the tensors whose shapes and order are wanted; none give no view.

    Raises:
        ValueError: ``coalesced`` is not 1-D or too short.
    """
    total = sum(map(Tensor.numel, bucket))
    if coalesced.dim() != 1 or coalesced.numel() < total:
        raise ValueError(
            f"unflatten: coalesced has shape {list(coalesced.shape)}, but bucket holds {total} "
            "elements; expected the 1-D result of flatten(bucket)."
        )
    return list(_unflatten_dense_tensors(coalesced, bucket))


imported_flatten_impl = True
"""Always True: there is one implementation of flatten and unflatten."""


def import_flatten_impl() -> tuple[Callable, Callable]:
    """The pair ``(flatten, unflatten)`` in use; old scripts call this before using them."""
    return flatten, unflatten


def split_by_type(tensors: Iterable[Tensor]) -> OrderedDict[str, list[Tensor]]:
    """Group tensors by ``tensor.type()`` (dtype and device type), in order of appearance."""
    groups: OrderedDict[str, list[Tensor]] = OrderedDict()
    for tensor in tensors:
        groups.setdefault(tensor.type(), []).append(tensor)
    return groups


def split_half_float_double_bfloat16(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype: fp16, fp32, fp64, bf16 in this order, without the empty groups.

    Raises:
        TypeError: a tensor has another dtype.
    """
    groups: dict[torch.dtype, list[Tensor]] = {dtype: [] for dtype in HALF_FLOAT_DOUBLE_BFLOAT16}
    for position, tensor in enumerate(tensors):
        if tensor.dtype not in groups:
            raise TypeError(
                f"split_half_float_double_bfloat16: tensors[{position}] is {tensor.dtype}; "
                "expected float16, float32, float64 or bfloat16."
            )
        groups[tensor.dtype].append(tensor)
    return [group for group in groups.values() if group]


def apply_flat_dist_call(
    bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Run one collective on the joined tensors and copy the result back into them.

    ``call(flat, *extra_args)`` runs first. When it is ``torch.distributed.all_reduce`` with
    ``ReduceOp.SUM``, the result is divided by the size of the group it ran on, that is, averaged.

    Args:
        bucket: tensors of one dtype and device, written in place.
        call: a collective of ``torch.distributed`` that works in place on its first argument.
        extra_args: its further positional arguments, such as ``(op, group)``.
    """
    arguments = tuple(extra_args) if extra_args is not None else ()
    coalesced = flatten(bucket)
    work = call(coalesced, *arguments)
    if isinstance(work, dist.Work):
        work.wait()
    operation = arguments[0] if arguments else dist.ReduceOp.SUM
    if call is dist.all_reduce and operation == dist.ReduceOp.SUM:
        coalesced.div_(dist.get_world_size(arguments[1] if len(arguments) > 1 else None))
    with torch.no_grad():
        torch._foreach_copy_(list(bucket), unflatten(coalesced, bucket))


def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """:func:`apply_flat_dist_call` on each group of :func:`split_by_type`."""
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


def extract_tensors(maybe_tensor: Any, tensor_list: list[Tensor]) -> None:
    """Append every tensor found in nested iterables (a mapping's values) to ``tensor_list``.

    Raises:
        TypeError: something is neither a tensor nor an iterable of them.
    """
    if isinstance(maybe_tensor, Tensor):
        tensor_list.append(maybe_tensor)
        return
    if isinstance(maybe_tensor, str | bytes) or not isinstance(maybe_tensor, Iterable):
        raise TypeError(
            "extract_tensors: expected a tensor or a (nested) iterable of tensors, got "
            f"{type(maybe_tensor).__name__}."
        )
    items = maybe_tensor.values() if isinstance(maybe_tensor, Mapping) else maybe_tensor
    for item in items:
        extract_tensors(item, tensor_list)
