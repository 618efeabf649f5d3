"""Normalization of DTensors: every process normalizes the rows of its shard, without communication.

Only what does not consist of whole rows is gathered first: an input that is sharded along the
normalized dimensions, weights that are sharded at all. Gradients of weights are summed over the
processes and come back placed as the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .checks import as_shape


def run_on_shards(function: type[Function], x: DTensor, *arguments: Any) -> DTensor:
    """Apply one of the functions of ``functions.py`` to a DTensor.

    Raises:
        TypeError: a weight or bias is no DTensor, so that its gradient would miss other shards.
        ValueError: they are on another device mesh.
    """
    from .apply import run

    count = sum(a is None or isinstance(a, Tensor) for a in arguments)
    parameters, (shape, *options) = arguments[:count], arguments[count:]

    def on_shard(rows: Sequence[Tensor], parameters: Sequence[Tensor | None]) -> list[Tensor]:
        return [run(function, *rows, *parameters, shape, *options)]

    (y,) = on_local_rows(on_shard, [x], parameters, len(as_shape(shape)))
    return y


def on_local_rows(
    call: Callable[[Sequence[Tensor], Sequence[Tensor | None]], Sequence[Tensor]],
    rows: Sequence[DTensor],
    parameters: Sequence[DTensor | None],
    dims: int,
) -> list[DTensor]:
    """Call ``call(rows, parameters)`` with local tensors, and wrap results of the rows' shape.

    Args:
        call: takes and returns local tensors.
        rows: DTensors of one shape; the first decides about the placement of all.
        parameters: DTensors of the size of the last ``dims`` dimensions, or None.
        dims: how many dimensions are normalized.
    """
    mesh, shape = rows[0].device_mesh, rows[0].shape
    for tensor in (*rows, *(p for p in parameters if p is not None)):
        if not isinstance(tensor, DTensor):
            raise TypeError(
                "normalization of a DTensor: the other operands must be DTensors, too, got a "
                f"plain tensor {list(tensor.shape)}. Distribute the module, for instance with "
                "torch.distributed.tensor.distribute_module."
            )
        if tensor.device_mesh != mesh:
            raise ValueError(
                f"normalization of a DTensor: its mesh is {mesh}, that of another operand is "
                f"{tensor.device_mesh}; they must be the same."
            )
    whole = len(shape) - dims
    placements = [
        p if isinstance(p, Shard) and p.dim % len(shape) < whole else Replicate()
        for p in rows[0].placements
    ]
    # Each shard sees some of the rows: its gradient of a weight is a part of the sum.
    sums = [Partial() if isinstance(p, Shard) else Replicate() for p in placements]
    replicated = [Replicate()] * mesh.ndim
    local_rows = [
        r.redistribute(mesh, placements).to_local(grad_placements=placements) for r in rows
    ]
    local_parameters = [
        None if p is None else p.redistribute(mesh, replicated).to_local(grad_placements=sums)
        for p in parameters
    ]
    strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    return [
        DTensor.from_local(y, mesh, placements, shape=shape, stride=strides, run_check=False)
        for y in call(local_rows, local_parameters)
    ]
