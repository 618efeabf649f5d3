"""Micro-batches of this process, what trainers print and average, and masks of language models."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..._lost_ranks import explained
from .. import parallel_state
from ..enums import ModelType
from ..microbatches import NumMicroBatchesCalculator, build_num_microbatches_calculator
from ._printing import is_last_rank as is_last_rank
from ._printing import print_rank_0 as print_rank_0
from ._printing import print_rank_last as print_rank_last
from ._timers import _Timers
from .p2p_communication import device

# Trainers read these.
_GLOBAL_NUM_MICROBATCHES_CALCULATOR: NumMicroBatchesCalculator | None = None
_GLOBAL_AUTORESUME: Any = None
_GLOBAL_TIMERS: _Timers | None = None

Shape = list[int] | torch.Size
Models = nn.Module | Sequence[nn.Module]


def listify_model(model: Models) -> list[nn.Module]:
    """``model`` as a list, in a list if it is one module."""
    return [model] if isinstance(model, nn.Module) else list(model)


def _ensure_var_is_initialized(var: Any, name: str) -> None:
    if var is None:
        raise RuntimeError(f"{name} is not set up")


def _ensure_var_is_not_initialized(var: Any, name: str) -> None:
    if var is not None:
        raise RuntimeError(f"{name} is set up already")


def setup_microbatch_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
) -> None:
    """Say how large batches are, once per process; the schedules ask for it.

    The arguments are those of ``microbatches.build_num_microbatches_calculator``. Raises
    ``RuntimeError`` if that has been said before.
    """
    _ensure_var_is_not_initialized(
        _GLOBAL_NUM_MICROBATCHES_CALCULATOR, "the micro-batch calculator"
    )
    _set_calculator(
        rank, rampup_batch_size, global_batch_size, micro_batch_size, data_parallel_size
    )


def _reconfigure_microbatch_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
) -> None:
    """:func:`setup_microbatch_calculator` once more, with a warning on rank 0."""
    if rank == 0 and _GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
        warnings.warn("the micro-batch calculator is replaced", stacklevel=2)
    _set_calculator(
        rank, rampup_batch_size, global_batch_size, micro_batch_size, data_parallel_size
    )


def _set_calculator(*arguments: Any) -> None:
    global _GLOBAL_NUM_MICROBATCHES_CALCULATOR
    _GLOBAL_NUM_MICROBATCHES_CALCULATOR = build_num_microbatches_calculator(*arguments)


def _calculator() -> Any:
    if _GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        raise RuntimeError("the sizes of batches are unknown: call setup_microbatch_calculator")
    return _GLOBAL_NUM_MICROBATCHES_CALCULATOR


def get_micro_batch_size() -> int:
    """Samples per micro-batch."""
    return _calculator().micro_batch_size


def get_num_microbatches() -> int:
    """Micro-batches per step and data-parallel rank."""
    return _calculator().get()


def get_current_global_batch_size() -> int:
    """Samples per step, over all ranks."""
    return _calculator().get_current_global_batch_size()


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True) -> None:
    """Adapt the batch's size to the number of samples consumed so far, if it grows."""
    _calculator().update(consumed_samples, consistency_check)


def _split_batch_into_microbatch(
    batch: Sequence[Tensor],
    *,
    _micro_batch_size: int | None = None,
    _global_batch_size: int | None = None,
) -> Iterator[list[Tensor]]:
    """The micro-batches of the first ``_global_batch_size`` rows, by default of all rows."""
    size = _micro_batch_size or get_micro_batch_size()
    rows = _global_batch_size or len(batch[0])
    for start in range(0, rows, size):
        yield [x[start : start + size] for x in batch]


def get_kth_microbatch(batch: Any, k: int) -> Any:
    """Rows ``k * size`` to ``(k + 1) * size`` of a tensor or of each tensor of a list.

    ``size`` is :func:`get_micro_batch_size`. None stays None. Raises ``ValueError`` where there
    are not that many rows.
    """
    if batch is None:
        return None
    size = get_micro_batch_size()
    start, end = k * size, (k + 1) * size
    for x in batch if isinstance(batch, (list, tuple)) else [batch]:
        if len(x) < end:
            raise ValueError(
                f"batch: micro-batch {k} of {size} samples ends at row {end}, but a tensor has "
                f"{len(x)} rows"
            )
    if isinstance(batch, (list, tuple)):
        return [x[start:end] for x in batch]
    return batch[start:end]


def get_autoresume() -> Any:
    """The object that asks a cluster for a restart, as trainers set it; None by default."""
    return _GLOBAL_AUTORESUME


def _set_timers() -> None:
    global _GLOBAL_TIMERS
    _ensure_var_is_not_initialized(_GLOBAL_TIMERS, "the set of timers")
    _GLOBAL_TIMERS = _Timers()


def get_timers() -> _Timers:
    """The process's timers; ``RuntimeError`` before ``_set_timers``."""
    _ensure_var_is_initialized(_GLOBAL_TIMERS, "the set of timers")
    assert _GLOBAL_TIMERS is not None  # for type checkers
    return _GLOBAL_TIMERS


def param_is_not_shared(param: Tensor) -> bool:
    """Whether ``param`` lacks a true attribute ``shared``, the mark of a copy on another stage."""
    return not getattr(param, "shared", False)


def unwrap_model(
    model: Models, module_instances: Any = (DistributedDataParallel,)
) -> nn.Module | list[nn.Module]:
    """What is inside wrappers of these classes; a list for a list."""
    models = []
    for module in listify_model(model):
        while isinstance(module, module_instances):
            module = module.module
        models.append(module)
    return models[0] if isinstance(model, nn.Module) else models


def get_model_type(model: nn.Module) -> ModelType:
    """The attribute ``model_type``, by default that of a model with one stack of layers."""
    return getattr(model, "model_type", ModelType.encoder_or_decoder)


def calc_params_l2_norm(model: Models, bf16: bool) -> float:
    """The norm of all parameters of the model, over all tensor- and pipeline-parallel ranks.

    Shared parameters and duplicates on tensor-parallel ranks count once.

    Args:
        model: this rank's part, or its parts.
        bf16: has no effect: squares are always added in float64.
    """
    from ..tensor_parallel.layers import param_is_not_tensor_parallel_duplicate

    params = [
        param.detach()
        for part in listify_model(model)
        for param in part.parameters()
        if param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param)
    ]
    norms = [torch.linalg.vector_norm(param, dtype=torch.float64) for param in params]
    norms.append(torch.zeros((), dtype=torch.float64, device=device()))
    squared = torch.stack(norms).square().sum()
    group = parallel_state.get_model_parallel_group()
    with explained("calc_params_l2_norm", group):
        dist.all_reduce(squared, group=group)
    return squared.sqrt().item()


def average_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Losses of one element each, averaged over replicas of the model: ``[len(losses)]``."""
    averaged = torch.cat([loss.detach().reshape(1) for loss in losses])
    group = parallel_state.get_data_parallel_group()
    with explained("average_losses_across_data_parallel_group", group):
        dist.all_reduce(averaged, group=group)
    return averaged / parallel_state.get_data_parallel_world_size()


def report_memory(name: str) -> None:
    """Print this process's memory in MiB, on data-parallel rank 0: the GPU's, or its peak."""
    megabytes = 1 / 2**20
    if torch.cuda.is_initialized():
        figures = {
            "allocated": torch.cuda.memory_allocated() * megabytes,
            "max allocated": torch.cuda.max_memory_allocated() * megabytes,
            "reserved": torch.cuda.memory_reserved() * megabytes,
            "max reserved": torch.cuda.max_memory_reserved() * megabytes,
        }
    else:
        import resource  # missing on Windows

        # Linux counts KiB.
        figures = {"max resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if parallel_state.get_data_parallel_rank() == 0:
        text = " | ".join(f"{key}: {value:.1f}" for key, value in figures.items())
        print(f"[rank {dist.get_rank()}] {name} memory (MiB) | {text}", flush=True)


def print_params_min_max_norm(optimizer: torch.optim.Optimizer, iteration: int) -> None:
    """Print iteration, rank, index, tensor-parallel mark, minimum, maximum, norm of parameters."""
    print("iteration, rank, index, tensor-parallel, min, max, norm", flush=True)
    params = (param.detach() for group in optimizer.param_groups for param in group["params"])
    for index, param in enumerate(params, 1):
        is_parallel = int(getattr(param, "tensor_model_parallel", False))
        values = param.min(), param.max(), torch.linalg.vector_norm(param)
        numbers = ", ".join(f"{value.item():.6E}" for value in values)
        print(f"{iteration}, {dist.get_rank()}, {index}, {is_parallel}, {numbers}", flush=True)


def get_ltor_masks_and_position_ids(
    data: Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Masks and positions for a language model that reads from left to right.

    A document ends with its ``eod_token``; the next token begins another document.

    Args:
        data: tokens, ``[batch, sequence]``.
        eod_token: the token that ends documents.
        reset_position_ids: count positions from the beginning of each document.
        reset_attention_mask: tokens do not see those of other documents.
        eod_mask_loss: the loss leaves out ``eod_token``.

    Returns:
        ``attention_mask``, bool, True where a token (third dimension) must not see another
        (fourth): ``[batch, 1, sequence, sequence]``, or ``[1, 1, sequence, sequence]`` without
        ``reset_attention_mask``; ``loss_mask``, float32, and ``position_ids``, int64,
        ``[batch, sequence]``; all on the device of ``data``.
    """
    batch, length = data.shape
    positions = torch.arange(length, device=data.device)
    ends = data == eod_token
    mask = (positions[None, :] > positions[:, None])[None, None]
    if reset_attention_mask:
        document = ends.cumsum(1) - ends.long()  # documents that ended before
        mask = mask | (document[:, None, :, None] != document[:, None, None, :])
    loss_mask = torch.ones(batch, length, dtype=torch.float32, device=data.device)
    if eod_mask_loss:
        loss_mask[ends] = 0.0
    position_ids = positions.expand(batch, length).clone()
    if reset_position_ids:
        after = torch.where(ends, positions + 1, 0).roll(1, 1)
        after[:, :1] = 0
        position_ids -= after.cummax(1).values
    return mask, loss_mask, position_ids
