"""Linear layers and an embedding whose weights are divided over the tensor-parallel ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import init

from .. import parallel_state
from ..placement import current_device
from ..utils import divide, tensor_rank_share
from .linear import (
    LinearWithGradAccumulationAndAsyncCommunication,
    linear_with_grad_accumulation_and_async_allreduce,
    linear_with_grad_accumulation_and_async_allreduce_in16bit,
)
from .mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from .random import get_cuda_rng_tracker
from .utils import VocabUtility

__all__ = [
    "ColumnParallelLinear",
    "LinearWithGradAccumulationAndAsyncCommunication",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_tensor_model_parallel_attributes",
    "linear_with_grad_accumulation_and_async_allreduce",
    "linear_with_grad_accumulation_and_async_allreduce_in16bit",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
]

# Attributes of parameters, with the values of one that is not divided.
_MODEL_PARALLEL_ATTRIBUTE_DEFAULTS = {
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
}


def param_is_not_tensor_parallel_duplicate(param: Tensor) -> bool:
    """Whether this rank counts ``param``: it is divided, or this is the first tensor rank."""
    is_divided = getattr(param, "tensor_model_parallel", False)
    return bool(is_divided) or parallel_state.get_tensor_model_parallel_rank() == 0


def set_tensor_model_parallel_attributes(
    tensor: Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Say how ``tensor`` is divided; ``RuntimeError`` if that was said before."""
    values = (is_parallel, dim, stride)
    for name in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS:
        if hasattr(tensor, name):
            raise RuntimeError(f"set_tensor_model_parallel_attributes: the tensor has {name}")
    for name, value in zip(_MODEL_PARALLEL_ATTRIBUTE_DEFAULTS, values, strict=True):
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Say that ``tensor`` is not divided, where nothing was said."""
    for name, value in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(
    destination_tensor: Tensor, source_tensor: Tensor
) -> None:
    """Say of one tensor what was said of the other."""
    for name in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def _initialize_affine_weight_gpu(
    weight: Tensor, init_method: Callable[[Tensor], Any], partition_dim: int, stride: int = 1
) -> None:
    """Initialise this rank's part by itself, from the tracker's random state."""
    set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    with get_cuda_rng_tracker().fork():
        init_method(weight)


def _initialize_affine_weight_cpu(
    weight: Tensor,
    output_size: int,
    input_size: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: Callable[[Tensor], Any],
    stride: int = 1,
    return_master_weight: bool = False,
    *,
    params_dtype: torch.dtype = torch.float32,
) -> Tensor | None:
    """Initialise the whole weight, in float32 and the same on all ranks, and keep this rank's part.

    Blocks of ``per_partition_size / stride`` go to the ranks in turn. All ranks must have the same
    state of the CPU's generator.
    """
    set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    block = divide(
        per_partition_size,
        stride,
        what="stride: a rank's part of the weight",
        by="blocks",
        remedy="Make output_size of a column-parallel layer, or input_size of a row-parallel one, "
        f"a multiple of ranks x {stride}; or leave stride at 1.",
    )
    whole = torch.empty(output_size, input_size, dtype=torch.float32, device="cpu")
    init_method(whole)
    whole = whole.to(params_dtype)
    blocks = whole.split(block, dim=partition_dim)
    rank = parallel_state.get_tensor_model_parallel_rank()
    mine = blocks[rank :: parallel_state.get_tensor_model_parallel_world_size()]
    with torch.no_grad():
        weight.copy_(torch.cat(mine, dim=partition_dim))
    return whole if return_master_weight else None


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are divided over the tensor-parallel ranks.

    Args:
        num_embeddings: size of the whole vocabulary, divisible by the number of ranks.
        embedding_dim: size of a row.
        init_method: initialises a weight in place. Without ``use_cpu_initialization`` it draws from
            the state that :func:`model_parallel_cuda_manual_seed` makes.
        params_dtype: dtype of ``weight``, ``[num_embeddings / ranks, embedding_dim]``.
        use_cpu_initialization: make the whole weight on the CPU on every rank and keep a part: the
            same at any number of ranks.

    Raises:
        ValueError: the ranks do not divide ``num_embeddings``.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: Callable[[Tensor], Any] = init.xavier_normal_,
        *,
        params_dtype: torch.dtype = torch.float32,
        use_cpu_initialization: bool = False,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.tensor_model_parallel_size = parallel_state.get_tensor_model_parallel_world_size()
        self.num_embeddings_per_partition = tensor_rank_share(
            "VocabParallelEmbedding: num_embeddings", num_embeddings
        )
        self.vocab_start_index, self.vocab_end_index = (
            VocabUtility.vocab_range_from_per_partition_vocab_size(
                self.num_embeddings_per_partition,
                parallel_state.get_tensor_model_parallel_rank(),
                self.tensor_model_parallel_size,
            )
        )
        shape = (self.num_embeddings_per_partition, embedding_dim)
        self.weight, _ = _Making(init_method, params_dtype, use_cpu_initialization).part(shape, 0)

    def forward(self, input_: Tensor) -> Tensor:
        """``[*]`` ids to ``[*, embedding_dim]``.

        Ids outside the whole vocabulary give zeros; with one rank they are torch's error.
        """
        if self.tensor_model_parallel_size == 1:
            return F.embedding(input_, self.weight)
        is_elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        local = (input_ - self.vocab_start_index).masked_fill(is_elsewhere, 0)
        rows = F.embedding(local, self.weight).masked_fill(is_elsewhere.unsqueeze(-1), 0)
        return reduce_from_tensor_model_parallel_region(rows)


class _Making(NamedTuple):
    """How a weight is made, of which each rank has a part."""

    init_method: Callable[[Tensor], Any]
    dtype: torch.dtype
    on_cpu: bool  # the whole weight, on every rank
    stride: int = 1
    keeps_whole: bool = False

    def part(self, shape: tuple[int, int], dim: int) -> tuple[nn.Parameter, Tensor | None]:
        """This rank's part, of this ``shape``, of a weight divided along ``dim``; the whole, or
        None."""
        init_method, dtype, on_cpu, stride, keeps_whole = self
        device = torch.device("cpu") if on_cpu else current_device()
        weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if not on_cpu:
            _initialize_affine_weight_gpu(weight, init_method, partition_dim=dim, stride=stride)
            return weight, None
        whole = list(shape)
        whole[dim] *= parallel_state.get_tensor_model_parallel_world_size()
        master = _initialize_affine_weight_cpu(
            weight, *whole, shape[dim], dim, init_method, stride, keeps_whole, params_dtype=dtype
        )
        return weight, master


class _ParallelLinear(nn.Module):
    """What both linear layers have: a part of a weight, a bias, and how to multiply by it."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def _divide(self, shape: tuple[int, int], dim: int, making: _Making, bias: bool) -> None:
        self.weight, self.master_weight = making.part(shape, dim)
        zeros = torch.zeros(shape[0], device=self.weight.device, dtype=making.dtype)
        self.register_parameter("bias", nn.Parameter(zeros) if bias else None)

    def _multiply(self, x: Tensor, bias: Tensor | None, is_async: bool, gathers: bool) -> Tensor:
        function = linear_with_grad_accumulation_and_async_allreduce
        if self.accumulation_in_fp16:
            function = linear_with_grad_accumulation_and_async_allreduce_in16bit
        fusion = self.gradient_accumulation_fusion
        return function(x, self.weight, bias, fusion, is_async, gathers)

    def extra_repr(self) -> str:
        rows, columns = self.weight.shape
        return f"{columns} to {rows} on this rank, bias={self.bias is not None}"


class ColumnParallelLinear(_ParallelLinear):
    """``y = x A^T + b`` with the rows of ``A``, so the columns of ``y``, divided over the ranks.

    Args:
        input_size: features of ``x``.
        output_size: features of ``y``, divisible by the number of tensor-parallel ranks.
        bias: whether there is one, zeros at first.
        gather_output: whether every rank gets the whole ``y``, or its columns.
        init_method: initialises a weight in place. Without ``use_cpu_initialization`` it draws from
            the state that :func:`model_parallel_cuda_manual_seed` makes.
        stride: number of blocks of ``A`` on a rank, where it was joined from several weights.
        keep_master_weight_for_test: keep the whole ``A`` as ``master_weight``, if it was made.
        skip_bias_add: return the bias instead of adding it, for a fused operation that follows.
        no_async_tensor_model_parallel_allreduce: add the input's gradients over the ranks after
            the weight's gradient is computed, not meanwhile. By default that is so with
            ``sequence_parallel_enabled`` alone, which adds them itself; ``False`` with it raises.
        params_dtype: dtype of the parameters.
        use_cpu_initialization: make the whole weight on the CPU on every rank and keep a part: the
            same at any number of ranks.
        gradient_accumulation_fusion: add the weight's gradient to ``weight.main_grad`` in place,
            and leave ``weight.grad`` alone.
        accumulation_in_fp16: ``main_grad`` has the 16-bit dtype of the weight, not float32.
        sequence_parallel_enabled: ``x`` is divided over the ranks along its first dimension.

    Attributes:
        weight: ``[output_size / ranks, input_size]``.
        bias: ``[output_size / ranks]`` or None.

    Raises:
        ValueError: the ranks do not divide ``output_size``.
        RuntimeError: ``sequence_parallel_enabled`` with
            ``no_async_tensor_model_parallel_allreduce=False``, on more than one rank.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: Callable[[Tensor], Any] = init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        no_async_tensor_model_parallel_allreduce: bool | None = None,
        params_dtype: torch.dtype = torch.float32,
        use_cpu_initialization: bool = False,
        gradient_accumulation_fusion: bool = False,
        accumulation_in_fp16: bool = False,
        sequence_parallel_enabled: bool = False,
    ) -> None:
        super().__init__()
        world = parallel_state.get_tensor_model_parallel_world_size()
        if sequence_parallel_enabled and world == 1:
            warnings.warn(
                "ColumnParallelLinear: sequence_parallel_enabled needs more than one "
                "tensor-parallel rank; it is off",
                stacklevel=2,
            )
            sequence_parallel_enabled = False
        self.input_size, self.output_size = input_size, output_size
        self.output_size_per_partition = tensor_rank_share(
            "ColumnParallelLinear: output_size", output_size
        )
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        self.accumulation_in_fp16 = accumulation_in_fp16
        self.sequence_parallel_enabled = sequence_parallel_enabled
        if no_async_tensor_model_parallel_allreduce is None:
            no_async_tensor_model_parallel_allreduce = sequence_parallel_enabled
        self.async_tensor_model_parallel_allreduce = (
            not no_async_tensor_model_parallel_allreduce and world > 1
        )
        if self.async_tensor_model_parallel_allreduce and sequence_parallel_enabled:
            raise RuntimeError(
                "`async_tensor_model_parallel_allreduce` and `sequence_parallel_enabled` cannot be "
                "enabled at the same time."
            )
        keeps_whole = keep_master_weight_for_test
        making = _Making(init_method, params_dtype, use_cpu_initialization, stride, keeps_whole)
        self._divide((self.output_size_per_partition, input_size), 0, making, bias)
        if self.bias is not None:
            set_tensor_model_parallel_attributes(self.bias, True, 0, stride)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[*, input_size]`` to ``[*, output_size]`` (or a part of it) and the bias if not added.

        Raises ``RuntimeError`` with both ``gather_output`` and ``sequence_parallel_enabled``.
        """
        gathers = self.sequence_parallel_enabled
        if gathers and self.gather_output:
            raise RuntimeError(
                "ColumnParallelLinear: with sequence_parallel_enabled, pass gather_output=False"
            )
        if not (self.async_tensor_model_parallel_allreduce or gathers):
            input_ = copy_to_tensor_model_parallel_region(input_)
        bias = None if self.skip_bias_add else self.bias
        is_async = self.async_tensor_model_parallel_allreduce
        output = self._multiply(input_, bias, is_async, gathers)
        if self.gather_output:
            output = gather_from_tensor_model_parallel_region(output)
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinear(_ParallelLinear):
    """``y = x A^T + b`` with the columns of ``A``, so those of ``x``, divided over the ranks.

    Args:
        input_size: features of ``x``, divisible by the number of tensor-parallel ranks.
        output_size: features of ``y``.
        bias: whether there is one, zeros at first and the same on all ranks.
        input_is_parallel: ``x`` is this rank's columns already, not the whole.
        sequence_parallel_enabled: divide ``y`` over the ranks along its first dimension; needs
            ``input_is_parallel``.

    The others are those of :class:`ColumnParallelLinear`.

    Attributes:
        weight: ``[output_size, input_size / ranks]``.
        bias: ``[output_size]`` or None. Its attribute ``sequence_parallel_enabled`` tells a trainer
            to add its gradients over the tensor-parallel ranks.

    Raises:
        ValueError: the ranks do not divide ``input_size``.
        RuntimeError: ``sequence_parallel_enabled`` without ``input_is_parallel``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: Callable[[Tensor], Any] = init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        params_dtype: torch.dtype = torch.float32,
        use_cpu_initialization: bool = False,
        gradient_accumulation_fusion: bool = False,
        accumulation_in_fp16: bool = False,
        sequence_parallel_enabled: bool = False,
    ) -> None:
        super().__init__()
        if sequence_parallel_enabled and not input_is_parallel:
            raise RuntimeError(
                "RowParallelLinear: with sequence_parallel_enabled, pass input_is_parallel=True"
            )
        self.input_size, self.output_size = input_size, output_size
        self.input_size_per_partition = tensor_rank_share(
            "RowParallelLinear: input_size", input_size
        )
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        self.accumulation_in_fp16 = accumulation_in_fp16
        self.sequence_parallel_enabled = sequence_parallel_enabled
        keeps_whole = keep_master_weight_for_test
        making = _Making(init_method, params_dtype, use_cpu_initialization, stride, keeps_whole)
        self._divide((output_size, self.input_size_per_partition), 1, making, bias)
        if self.bias is not None:
            self.bias.sequence_parallel_enabled = sequence_parallel_enabled

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[*, input_size]`` (or a part) to ``[*, output_size]`` and the bias if not added.

        Raises ``ValueError`` with ``sequence_parallel_enabled`` if the ranks do not divide the
        first dimension.
        """
        if self.sequence_parallel_enabled:
            tensor_rank_share("RowParallelLinear: first dimension of input_", input_.shape[0])
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_)
        partial = self._multiply(input_, None, is_async=False, gathers=False)
        if self.sequence_parallel_enabled:
            output = reduce_scatter_to_sequence_parallel_region(partial)
        else:
            output = reduce_from_tensor_model_parallel_region(partial)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None
