"""DTensors, the parameters of FSDP2: every process unscales and copies its shard."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_PLAIN = {Tensor, torch.nn.Parameter}


def _sharded_types(tensors: Iterable[Tensor]) -> set[type]:
    """The classes among ``tensors`` that are DTensors; quick, for lists of thousands."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:  # nothing imported the module that defines them, so there are none
        return set()
    return {kind for kind in set(map(type, tensors)) if issubclass(kind, module.DTensor)}


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return bool(_sharded_types((tensor,)))


def local(tensor: Tensor) -> Tensor:
    """The shard of this process, which shares memory with a DTensor; a plain tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def local_tensors(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """:func:`local` of each; the same list if there is nothing to replace."""
    if _PLAIN.issuperset(map(type, tensors)):  # without a frame more, as below
        return tensors
    return [local(tensor) for tensor in tensors] if _sharded_types(tensors) else tensors


def meshes_of(tensors: Sequence[Tensor]) -> list[Any]:
    """The device meshes that ``tensors`` are spread over, each once, in order of occurrence."""
    if _PLAIN.issuperset(map(type, tensors)):
        return []
    kinds = _sharded_types(tensors)
    return list(dict.fromkeys(t.device_mesh for t in tensors if type(t) in kinds))


def share_flags(flags: Iterable[Tensor], meshes: Iterable[Any]) -> None:
    """Set each flag that is set on any process of a mesh; all of them must call it.

    Args:
        flags: int32 ``[1]``; changed in place.
        meshes: device meshes; a flag takes part in those of its device type.
    """
    for flag in flags:
        for mesh in meshes:
            if mesh.device_type == flag.device.type:
                for group in mesh.get_all_groups():
                    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group)


def has_shards(model: torch.nn.Module) -> bool:
    """Whether a parameter of ``model`` is a DTensor."""
    return bool(_sharded_types(model.parameters()))
