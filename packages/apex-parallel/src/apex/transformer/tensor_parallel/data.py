"""A batch that one tensor-parallel rank has read, handed to the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._lost_ranks import explained
from .. import parallel_state
from ..placement import current_device

__all__ = ["broadcast_data"]


def _check_data_types(
    keys: Iterable[str], data: Mapping[str, Tensor], target_dtype: torch.dtype
) -> None:
    for key in keys:
        if data[key].dtype != target_dtype:
            raise TypeError(
                f"broadcast_data: data[{key!r}] is {data[key].dtype}, expected {target_dtype}"
            )


def _sizes(keys: list[str], data: object, dtype: torch.dtype | None) -> list[Any] | Exception:
    """What the first rank tells the others: sizes by key, or why there are none."""
    try:
        if not isinstance(data, Mapping):
            raise TypeError(
                f"broadcast_data: data: expected a dict of tensors on the first tensor-parallel "
                f"rank, got {type(data).__name__}"
            )
        for key in keys:
            if key not in data:
                raise KeyError(f"broadcast_data: data has no {key!r}, which is among the keys")
        if dtype is not None:
            _check_data_types(keys, data, dtype)
    except (KeyError, TypeError) as error:
        return error  # raised on every rank: the others would wait for data for ever
    return [list(data[key].shape) for key in keys]


def _build_key_size_numel_dictionaries(
    keys: Iterable[str], data: Mapping[str, Tensor] | None, _dtype: torch.dtype | None = None
) -> tuple[dict[str, list[int]], dict[str, int], int]:
    """The sizes of the first tensor-parallel rank's tensors, told to all ranks of the group.

    Args:
        keys: names of the tensors, the same on all ranks.
        data: tensors of any dtype; only the first rank's are looked at, others may pass None.

    Returns:
        Size by key, number of elements by key, and the sum of those numbers.

    Raises:
        KeyError, TypeError: a tensor is missing; on all ranks of the group.
    """
    keys = list(keys)
    group, device = parallel_state.get_tensor_model_parallel_group(), current_device()
    source = parallel_state.get_tensor_model_parallel_src_rank()
    told = [_sizes(keys, data, _dtype) if dist.get_rank() == source else None]
    with explained("broadcast_data", group):
        dist.broadcast_object_list(told, src=source, group=group, device=device)
    if isinstance(told[0], Exception):
        raise told[0]
    sizes = dict(zip(keys, told[0], strict=True))
    numels = {key: math.prod(size) for key, size in sizes.items()}
    return sizes, numels, sum(numels.values())


def broadcast_data(
    keys: Iterable[str], data: Mapping[str, Tensor] | None, datatype: torch.dtype
) -> dict[str, Tensor]:
    """Tensors of the first tensor-parallel rank, on all ranks of the group.

    Args:
        keys: names of the tensors, the same on all ranks.
        data: tensors of any shape; only the first rank's are looked at, others may pass None.
        datatype: their dtype.

    Returns:
        The tensors by name, on the current GPU, or on the CPU where there is none or where the
        world communicates by gloo. They share one piece of memory.

    Raises:
        KeyError, TypeError: a tensor is missing or has another dtype; on all ranks of the group.
    """
    keys = list(keys)
    group, device = parallel_state.get_tensor_model_parallel_group(), current_device()
    source = parallel_state.get_tensor_model_parallel_src_rank()
    sizes, numels, total = _build_key_size_numel_dictionaries(keys, data, datatype)
    if dist.get_rank() == source:
        tensors = [data[key].to(device).reshape(-1) for key in keys]
        flat = torch.cat(tensors) if tensors else torch.empty(0, dtype=datatype, device=device)
    else:
        flat = torch.empty(total, dtype=datatype, device=device)
    # As bytes: gloo does not know all dtypes.
    with explained("broadcast_data", group):
        dist.broadcast(flat.view(torch.uint8), src=source, group=group)
    parts = flat.split(list(numels.values()))
    return {key: part.view(sizes[key]) for key, part in zip(sizes, parts, strict=True)}
