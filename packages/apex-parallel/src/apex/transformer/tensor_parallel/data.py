"""A batch that one tensor-parallel rank has read, handed to the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from .. import parallel_state
from ..placement import current_device

__all__ = ["broadcast_data"]


def _check_data_types(
    keys: Iterable[str], data: Mapping[str, Tensor], target_dtype: torch.dtype
) -> None:
    for key in keys:
        if key not in data:
            raise KeyError(f"broadcast_data: data has no {key!r}, which is among the keys")
        if data[key].dtype != target_dtype:
            raise TypeError(
                f"broadcast_data: data[{key!r}] is {data[key].dtype}, expected {target_dtype}"
            )


def _sizes(keys: list[str], data: object, dtype: torch.dtype) -> list[torch.Size] | Exception:
    """What the first rank tells the others: shapes, or why there are none."""
    try:
        if not isinstance(data, Mapping):
            raise TypeError(f"broadcast_data: expected a dict of tensors, got {type(data)}")
        _check_data_types(keys, data, dtype)
    except (KeyError, TypeError) as error:
        return error  # raised on every rank: the others would wait for data for ever
    return [data[key].shape for key in keys]


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
    is_source = dist.get_rank() == source
    told = [_sizes(keys, data, datatype) if is_source else None]
    dist.broadcast_object_list(told, src=source, group=group, device=device)
    sizes = told[0]
    if isinstance(sizes, Exception):
        raise sizes
    numels = [size.numel() for size in sizes]
    if is_source:
        tensors = [data[key].to(device).reshape(-1) for key in keys]
        flat = torch.cat(tensors) if tensors else torch.empty(0, dtype=datatype, device=device)
    else:
        flat = torch.empty(sum(numels), dtype=datatype, device=device)
    # As bytes: gloo does not know all dtypes.
    dist.broadcast(flat.view(torch.uint8), src=source, group=group)
    parts = zip(keys, flat.split(numels), sizes, strict=True)
    return {key: part.view(size) for key, part, size in parts}
