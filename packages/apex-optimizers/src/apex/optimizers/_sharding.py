"""DTensors, the parameters of FSDP2: every process updates its shard."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; without importing what defines it, which takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The shards of this process; tensors that are no DTensors are returned as they are."""
    return [t.to_local() if is_sharded(t) else t for t in tensors]


def on_shards(function: Callable[..., Tensor], first: Tensor, *others: Any) -> Tensor:
    """``function(first, *others)`` of the shards, with the result sharded as ``first`` is.

    For functions of each element that neither torch nor this library has as operators of DTensors.
    """
    if not is_sharded(first):
        return function(first, *others)
    from torch.distributed.tensor import DTensor

    arguments = [t.to_local() if is_sharded(t) else t for t in (first, *others)]
    return DTensor.from_local(
        function(*arguments),
        first.device_mesh,
        first.placements,
        run_check=False,
        shape=first.shape,
        stride=first.stride(),
    )


def differ_in_placement(param: Tensor, grad: Tensor) -> bool:
    """Whether a gradient's shards are not those of its parameter."""
    if not is_sharded(param) and not is_sharded(grad):
        return False
    return (
        is_sharded(param) != is_sharded(grad)
        or param.device_mesh != grad.device_mesh
        or tuple(param.placements) != tuple(grad.placements)
    )
