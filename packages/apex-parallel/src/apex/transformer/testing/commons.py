"""Toy models, their step functions, and the beginning of a test script."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import parallel_state
from ..tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    model_parallel_cuda_manual_seed,
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)

__all__ = [
    "TEST_SUCCESS_MESSAGE",
    "IdentityLayer",
    "MyLayer",
    "MyModel",
    "ToyParallelMLP",
    "ToyParallelMLPFwdBwdStepFunc",
    "fwd_step_func",
    "initialize_distributed",
    "mlp_provider_func",
    "model_provider_func",
    "print_separator",
    "process_batch",
    "set_random_seed",
]

TEST_SUCCESS_MESSAGE = ">> passed the test :-)"
"""What scripts print when all went well."""


class _Stage(nn.Module):
    """A stage of a pipeline: its input comes from the previous stage, if there is one."""

    input_tensor: Tensor | None = None

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Take what the previous stage sent; None for the first stage."""
        if isinstance(input_tensor, (list, tuple)):
            input_tensor = input_tensor[0]
        self.input_tensor = input_tensor

    def _input(self, x: Tensor | None) -> Tensor:
        chosen = x if self.input_tensor is None else self.input_tensor
        if chosen is None:
            raise ValueError("x: the stage got neither a batch nor the previous stage's output")
        return chosen


class MyLayer(nn.Module):
    """One linear layer, ``[*, hidden_size]`` to the same."""

    def __init__(self, hidden_size: int, pre_process: bool, post_process: bool) -> None:
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process
        self.layer = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class MyModel(_Stage):
    """A stage of one :class:`MyLayer`."""

    def __init__(
        self,
        hidden_size: int,
        pre_process: bool = False,
        post_process: bool = False,
        *,
        add_encoder: bool = False,
        add_decoder: bool = False,
    ) -> None:
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process
        self.layer = MyLayer(hidden_size, pre_process, post_process)

    def forward(self, x: Tensor | None) -> Tensor:
        return self.layer(self._input(x))


class ToyParallelMLP(_Stage):
    """A stage of two tensor-parallel linear layers with a GELU between, ``[*, hidden_size]``.

    With ``sequence_parallel_enabled`` input and output are divided over the tensor-parallel ranks
    along the first dimension.
    """

    def __init__(
        self,
        hidden_size: int,
        pre_process: bool = False,
        post_process: bool = False,
        *,
        sequence_parallel_enabled: bool = False,
        add_encoder: bool = False,
        add_decoder: bool = False,
    ) -> None:
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.dense_h_to_4h = ColumnParallelLinear(
            hidden_size,
            4 * hidden_size,
            gather_output=False,
            init_method=nn.init.xavier_uniform_,
            use_cpu_initialization=True,
            sequence_parallel_enabled=sequence_parallel_enabled,
        )
        self.dense_4h_to_h = RowParallelLinear(
            4 * hidden_size,
            hidden_size,
            input_is_parallel=True,
            init_method=nn.init.xavier_uniform_,
            use_cpu_initialization=True,
            sequence_parallel_enabled=sequence_parallel_enabled,
        )

    def forward(self, x: Tensor | None) -> Tensor:
        hidden, _ = self.dense_h_to_4h(self._input(x))
        return self.dense_4h_to_h(nn.functional.gelu(hidden))[0]


def model_provider_func(
    hidden_size: int,
    pre_process: bool,
    post_process: bool,
    *,
    add_encoder: bool = False,
    add_decoder: bool = False,
) -> MyModel:
    """A stage for ``build_model``."""
    return MyModel(
        hidden_size, pre_process, post_process, add_encoder=add_encoder, add_decoder=add_decoder
    )


def mlp_provider_func(
    hidden_size: int,
    pre_process: bool,
    post_process: bool,
    *,
    add_encoder: bool = False,
    add_decoder: bool = False,
    sequence_parallel_enabled: bool = False,
) -> ToyParallelMLP:
    """A tensor-parallel stage for ``build_model``."""
    return ToyParallelMLP(
        hidden_size,
        pre_process,
        post_process,
        add_encoder=add_encoder,
        add_decoder=add_decoder,
        sequence_parallel_enabled=sequence_parallel_enabled,
    )


def process_batch(batch: Tensor | list[Tensor]) -> Tensor:
    """The tensor of a batch, which may be a list of one."""
    return batch[0] if isinstance(batch, (list, tuple)) else batch


def _sum_of_outputs(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss, and its mean over the data-parallel ranks for reports."""
    from ..pipeline_parallel.utils import average_losses_across_data_parallel_group

    loss = output.sum()
    return loss, {"avg": average_losses_across_data_parallel_group([loss])}


def fwd_step_func(
    batch: Tensor | list[Tensor], model: nn.Module
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
    """A step of :class:`MyModel`: its output, and the sum of it as the loss."""
    return model(None if batch is None else process_batch(batch)), _sum_of_outputs


@dataclass(frozen=True)
class ToyParallelMLPFwdBwdStepFunc:
    """A step of :class:`ToyParallelMLP`. Batches are whole; with sequence parallelism each rank
    takes its part on the first stage, and losses are added over the ranks on the last."""

    sequence_parallel_enabled: bool

    def __call__(
        self, batch: Tensor | list[Tensor], model: nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
        x = None if batch is None else process_batch(batch)
        if not self.sequence_parallel_enabled:
            return model(x), _sum_of_outputs
        if x is not None and parallel_state.is_pipeline_first_stage():
            x = scatter_to_sequence_parallel_region(x)
        whole_loss = lambda output: _sum_of_outputs(
            reduce_from_tensor_model_parallel_region(output.sum())
        )
        return model(x), whole_loss


class IdentityLayer(nn.Module):
    """A weight of normal random numbers, which the layer returns."""

    def __init__(self, size: int | tuple[int, ...], scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(scale * torch.randn(size))

    def forward(self) -> Tensor:
        return self.weight


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy where it is installed, torch, and the tensor-parallel random states."""
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        numpy = None
    if numpy is not None:
        numpy.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def initialize_distributed(backend: str = "nccl") -> None:
    """Begin a script that ``torchrun`` or another launcher started, one rank per GPU.

    Reads ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``. Without a
    GPU ``"nccl"`` becomes gloo, and rank 0 says so.
    """
    rank, world = int(os.getenv("RANK", "0")), int(os.getenv("WORLD_SIZE", "1"))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.getenv("LOCAL_RANK", rank)) % torch.cuda.device_count())
    elif backend == "nccl":
        backend = "gloo"
        if rank == 0:
            print("> no GPU: the backend is gloo")
    where = f"tcp://{os.getenv('MASTER_ADDR', 'localhost')}:{os.getenv('MASTER_PORT', '6000')}"
    dist.init_process_group(backend, init_method=where, world_size=world, rank=rank)


def print_separator(message: str) -> None:
    """Print a line with ``message`` in its middle, on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"\n{f' {message} ':-^100}", flush=True)
