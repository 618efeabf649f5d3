"""Formulas of DTensors: every process computes the rows of its shard, without communication.

Arguments that are sharded along a row, and shared arguments that are sharded, are gathered first.
Gradients of shared tensors are summed over the processes and get the tensors' placements.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .batching import row_dims

if TYPE_CHECKING:
    from .formula import Formula


def on_shards(formula: Formula, arguments: tuple[Any, ...]) -> Any:
    """Call ``formula`` with local tensors, and make DTensors of its outputs.

    Raises:
        TypeError: some of the tensors are DTensors, but not all.
        ValueError: they are on several device meshes.
    """
    first = next(iter(formula.rows))
    _check(formula, arguments)
    x = arguments[first]
    dims = row_dims(x.dim(), formula.rows[first])
    mesh, lead = x.device_mesh, x.dim() - dims
    placements = row_placements(x, dims)
    # Each process sees some of the rows: its gradient of what they share is a part of the sum.
    sums = [Partial() if isinstance(p, Shard) else Replicate() for p in placements]
    local = list(arguments)
    for i in formula.rows:
        if local[i] is not None:
            placed = local[i].redistribute(mesh, placements)
            # torch 2.10 gathers along another dimension than the first without making rows whole.
            local[i] = placed.to_local(grad_placements=placements).contiguous()
    for i in formula.shared:
        if local[i] is not None:
            placed = local[i].redistribute(mesh, [Replicate()] * mesh.ndim)
            local[i] = placed.to_local(grad_placements=sums).contiguous()
    outputs = formula(*local)

    def sharded_output(output: torch.Tensor) -> DTensor:
        shape = (*x.shape[:lead], *output.shape[lead:])
        order = sorted(range(len(shape)), key=lambda d: (-output.stride(d), d))  # in memory
        strides = [math.prod(shape[d] for d in order[k + 1 :]) for k in range(len(order))]
        stride = tuple(strides[order.index(d)] for d in range(len(shape)))
        return DTensor.from_local(
            output, mesh, placements, shape=torch.Size(shape), stride=stride, run_check=False
        )

    return tuple(map(sharded_output, outputs)) if formula.outputs > 1 else sharded_output(outputs)


def row_placements(x: DTensor, dims: int) -> list[Placement]:
    """The placements that make rows of ``x``, of ``dims`` dimensions, whole: mostly its own."""
    lead = x.dim() - dims
    return [
        p if isinstance(p, Shard) and p.dim % x.dim() < lead else Replicate() for p in x.placements
    ]


def _check(formula: Formula, arguments: tuple[Any, ...]) -> None:
    tensors = [t for t in arguments[: formula.tensors] if t is not None]
    plain = next((t for t in tensors if not isinstance(t, DTensor)), None)
    if plain is not None:
        raise TypeError(
            f"{formula.name}: if one operand is a DTensor, all must be DTensors, but one is a "
            f"plain tensor {list(plain.shape)}. Distribute it, for instance with "
            "torch.distributed.tensor.distribute_tensor."
        )
    meshes = {t.device_mesh for t in tensors}
    if len(meshes) > 1:
        raise ValueError(
            f"{formula.name}: operands must be on one device mesh, got "
            f"{', '.join(map(str, meshes))}."
        )
