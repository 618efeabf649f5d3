"""DTensors, the parameters of FSDP2: every process updates its shard."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
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


def placement_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """What tells apart how DTensors are sharded; None for other tensors."""
    return (tensor.device_mesh, tuple(tensor.placements)) if is_sharded(tensor) else None


def reduce_over_shards(numbers: Tensor, like: Tensor, maximum: bool = False) -> Tensor:
    """Add up, or take the maximum of, what every process found in its shards; changes ``numbers``.

    Args:
        numbers: one per tensor, the same tensors on all processes.
        like: one of the tensors; a plain tensor has no other shards.
    """
    if is_sharded(like):
        import torch.distributed as dist

        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        for dimension, placement in enumerate(like.placements):
            # Not is_shard(): that of FSDP2 over tensor-parallel shards says no.
            if not placement.is_replicate():
                dist.all_reduce(numbers, op, group=like.device_mesh.get_group(dimension))
    return numbers


def whole_number(number: Tensor | None) -> Tensor | None:
    """A number as a plain tensor, also where torch found it in DTensors and made it one."""
    return number.full_tensor() if number is not None and is_sharded(number) else number


def norms_of(
    tensors: list[Tensor], whole: Tensor | None, per_tensor: bool = True, wide: bool = False
) -> Tensor:
    """Euclidean norm of each tensor [n], or of all together [1]; of shards, that of the whole.

    Args:
        whole: one of the DTensors that ``tensors`` are shards of; None, or a plain tensor, if they
            are whole.
        wide: that of all together in float64.
    """
    from apex.multi_tensor_apply.multi_tensor_l2norm import multi_tensor_l2norm

    with torch._C._AutoDispatchBelowADInplaceOrView():  # it writes to nothing
        norms = multi_tensor_l2norm(tensors, None, per_tensor, wide)[per_tensor]
    if whole is None or not is_sharded(whole):
        return norms
    squares = reduce_over_shards(norms.double().square_(), whole)
    return squares.sqrt_().to(norms.dtype)


def differ_in_placement(param: Tensor, grad: Tensor) -> bool:
    """Whether a gradient's shards are not those of its parameter."""
    if not is_sharded(param) and not is_sharded(grad):
        return False
    return (
        is_sharded(param) != is_sharded(grad)
        or param.device_mesh != grad.device_mesh
        or tuple(param.placements) != tuple(grad.placements)
    )
