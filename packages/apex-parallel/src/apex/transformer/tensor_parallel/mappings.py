"""Changes between whole tensors and those divided over the tensor-parallel ranks, with gradients.

Every change has a partner that is its gradient, so gradients of any order follow. With one
tensor-parallel rank all of them return their input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import parallel_state
from ..utils import tensor_rank_share
from . import collectives

__all__ = [
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]


def _is_alone() -> bool:
    return parallel_state.get_tensor_model_parallel_world_size() == 1


def _reduce(input_: Tensor) -> Tensor:
    """The sum over ranks; a new tensor."""
    if _is_alone():
        return input_
    return collectives.all_reduce(input_.clone(memory_format=torch.contiguous_format)).wait()


def _split_along_last_dim(input_: Tensor) -> Tensor:
    """This rank's part of the last dimension, contiguous."""
    if _is_alone():
        return input_
    what = "scatter_to_tensor_model_parallel_region: last dimension of input_"
    parts = input_.split(tensor_rank_share(what, input_.shape[-1]), dim=-1)
    return parts[parallel_state.get_tensor_model_parallel_rank()].contiguous()


def _split_along_first_dim(input_: Tensor) -> Tensor:
    """This rank's part of the first dimension, contiguous."""
    if _is_alone():
        return input_
    what = "scatter_to_sequence_parallel_region: first dimension of input_"
    size = tensor_rank_share(what, input_.shape[0])
    start = parallel_state.get_tensor_model_parallel_rank() * size
    return input_[start : start + size].contiguous()


def _gather_along_last_dim(input_: Tensor) -> Tensor:
    """The ranks' tensors side by side along the last dimension."""
    if _is_alone():
        return input_
    gathered = collectives.all_gather(input_).wait()
    world = parallel_state.get_tensor_model_parallel_world_size()
    return torch.cat(gathered.chunk(world), dim=-1)


def _gather_along_first_dim(input_: Tensor) -> Tensor:
    """The ranks' tensors behind each other along the first dimension."""
    return input_ if _is_alone() else collectives.all_gather(input_).wait()


def _reduce_scatter_along_first_dim(input_: Tensor) -> Tensor:
    """This rank's part, along the first dimension, of the sum over ranks."""
    if _is_alone():
        return input_
    what = "reduce_scatter_to_sequence_parallel_region: first dimension of input_"
    tensor_rank_share(what, input_.shape[0])
    copy = input_.clone(memory_format=torch.contiguous_format) if input_.is_cpu else input_
    return collectives.reduce_scatter(copy).wait()


class _Region(torch.autograd.Function):
    """What all changes have in common: in an ONNX graph, which knows one rank, they are nothing."""

    @staticmethod
    def symbolic(graph: Any, input_: Any, *_: Any) -> Any:
        if not _is_alone():
            raise RuntimeError("ONNX cannot express collectives: export with one tensor rank")
        return input_


class _CopyToModelParallelRegion(_Region):
    """Pass the input on; add its gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor) -> Tensor:
        return input_

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return _ReduceFromModelParallelRegion.apply(grad_output)


class _ReduceFromModelParallelRegion(_Region):
    """Add the inputs over the ranks; pass their gradient on."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor) -> Tensor:
        return _reduce(input_)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return _CopyToModelParallelRegion.apply(grad_output)


class _ScatterToModelParallelRegion(_Region):
    """Keep this rank's part of the last dimension; gather gradients."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor) -> Tensor:
        return _split_along_last_dim(input_)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return _GatherFromModelParallelRegion.apply(grad_output)


class _GatherFromModelParallelRegion(_Region):
    """Gather along the last dimension; keep this rank's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor) -> Tensor:
        return _gather_along_last_dim(input_)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return _ScatterToModelParallelRegion.apply(grad_output)


class _ScatterToSequenceParallelRegion(_Region):
    """Keep this rank's part of the first dimension; gather gradients."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor) -> Tensor:
        return _split_along_first_dim(input_)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return _GatherFromSequenceParallelRegion.apply(grad_output, False)


class _GatherFromSequenceParallelRegion(_Region):
    """Gather along the first dimension.

    The gradient is this rank's part of the ranks' gradients' sum, or of its own if all ranks do
    the same with what they gathered (``to_model_parallel=False``).
    """

    @staticmethod
    def forward(ctx: Any, input_: Tensor, to_model_parallel: bool = True) -> Tensor:
        ctx.to_model_parallel = to_model_parallel
        return _gather_along_first_dim(input_)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        if ctx.to_model_parallel:
            return _ReduceScatterToSequenceParallelRegion.apply(grad_output), None
        return _ScatterToSequenceParallelRegion.apply(grad_output), None


class _ReduceScatterToSequenceParallelRegion(_Region):
    """Add over the ranks and keep this rank's part of the first dimension; gather gradients."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor) -> Tensor:
        return _reduce_scatter_along_first_dim(input_)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return _GatherFromSequenceParallelRegion.apply(grad_output, True)


def copy_to_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """``input_``, whose gradients are added over the tensor-parallel ranks."""
    return _CopyToModelParallelRegion.apply(input_)


def reduce_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """The sum of ``input_`` over the tensor-parallel ranks; gradients pass unchanged."""
    return _ReduceFromModelParallelRegion.apply(input_)


def scatter_to_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """This rank's part of the last dimension; ``ValueError`` if it is not divisible."""
    return _ScatterToModelParallelRegion.apply(input_)


def gather_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """The ranks' parts of the last dimension, put together."""
    return _GatherFromModelParallelRegion.apply(input_)


def scatter_to_sequence_parallel_region(input_: Tensor) -> Tensor:
    """This rank's part of the first dimension; ``ValueError`` if it is not divisible."""
    return _ScatterToSequenceParallelRegion.apply(input_)


def gather_from_sequence_parallel_region(input_: Tensor, to_model_parallel: bool = True) -> Tensor:
    """The ranks' parts of the first dimension, put together.

    With ``to_model_parallel`` the ranks go on to do different things with the result, so their
    gradients are added; without, all do the same, and a rank keeps its part of its own.
    """
    return _GatherFromSequenceParallelRegion.apply(input_, to_model_parallel)


def reduce_scatter_to_sequence_parallel_region(input_: Tensor) -> Tensor:
    """This rank's part, along the first dimension, of the sum over the tensor-parallel ranks.

    ``ValueError`` if the dimension is not divisible.
    """
    return _ReduceScatterToSequenceParallelRegion.apply(input_)
