"""Collectives over the tensor-parallel group that may run behind other work."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..._lost_ranks import explained
from .. import parallel_state
from ..single_collectives import all_gather_single, reduce_scatter_single
from ..utils import tensor_rank_share


@dataclass
class Pending:
    """A result that is under way. It holds the work: gloo forgets work that nobody holds."""

    what: str  # for errors
    result: Tensor
    work: dist.Work | None = None
    part: slice | None = None  # of the first dimension, if the result is more than was asked for

    def wait(self) -> Tensor:
        """The result; on a GPU only the current stream waits."""
        if self.work is not None:
            with self._explained():
                self.work.wait()
        return self.result if self.part is None else self.result[self.part].clone()

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        rank = parallel_state.get_tensor_model_parallel_rank()
        group = parallel_state.get_tensor_model_parallel_group()
        what = f"the {self.what} into a tensor of shape {list(self.result.shape)}"
        return explained(what, group, who=f"tensor-parallel rank {rank}")


def all_reduce(x: Tensor, op: Any = dist.ReduceOp.SUM) -> Pending:
    """Add ``x`` over the ranks, or reduce it otherwise, in place; ``x`` is contiguous."""
    group = parallel_state.get_tensor_model_parallel_group()
    return Pending("all-reduce", x, dist.all_reduce(x, op, group, async_op=True))


def all_gather(x: Tensor) -> Pending:
    """The ranks' ``x`` behind each other along the first dimension."""
    world = parallel_state.get_tensor_model_parallel_world_size()
    gathered = x.new_empty((world * x.shape[0], *x.shape[1:]))
    group = parallel_state.get_tensor_model_parallel_group()
    work = all_gather_single(gathered, x.contiguous(), group=group, async_op=True)
    return Pending("all-gather", gathered, work)


def reduce_scatter(x: Tensor) -> Pending:
    """This rank's part, along the first dimension, of the sum of ``x``; ``x`` may be overwritten.

    Raises ``ValueError`` if the dimension is not divisible: gloo would not notice.
    """
    size = tensor_rank_share("reduce_scatter: first dimension of x", x.shape[0])
    group = parallel_state.get_tensor_model_parallel_group()
    if x.is_cpu:  # gloo's reduce_scatter is an all_reduce that runs before the call returns
        rank = parallel_state.get_tensor_model_parallel_rank()
        x = x.contiguous()
        work = dist.all_reduce(x, group=group, async_op=True)
        return Pending("reduce-scatter", x, work, slice(rank * size, (rank + 1) * size))
    part = x.new_empty((size, *x.shape[1:]))
    work = reduce_scatter_single(part, x.contiguous(), group=group, async_op=True)
    return Pending("reduce-scatter", part, work)
