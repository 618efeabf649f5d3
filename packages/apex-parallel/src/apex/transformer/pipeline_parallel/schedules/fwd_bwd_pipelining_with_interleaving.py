"""The schedule of a pipeline whose ranks hold several chunks of the model each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ... import parallel_state
from ...enums import ModelType
from ..utils import get_model_type, get_num_microbatches
from .actions import actions
from .common import Batch, FwdStepFunc, inner_model
from .fwd_bwd_pipelining_without_interleaving import get_tensor_shapes
from .loop import Loop, Wire

__all__ = ["_forward_backward_pipelining_with_interleaving"]


def _forward_backward_pipelining_with_interleaving(
    forward_step_func: FwdStepFunc,
    batch: Batch,
    model: Sequence[nn.Module],
    *,
    forward_only: bool,
    tensor_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    grad_scaler: Any = None,
    disable_autocast: bool = False,
    deallocate_pipeline_outputs: bool = False,
    async_comm: bool = False,
    sequence_parallel_enabled: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Run all micro-batches of one training step; the arguments are those of
    :func:`forward_backward_pipelining_without_interleaving`.

    Chunk ``c`` of stage ``r`` is part ``c * stages + r`` of the model. Stages wait for each other
    less than with one chunk, and keep more activations.

    Args:
        model: the list of this rank's chunks.

    Raises:
        RuntimeError: ``model`` is no list; the number of micro-batches is no multiple of the
            number of stages; the model has an encoder and a decoder; or see
            :func:`forward_backward_pipelining_without_interleaving`.
    """
    if not isinstance(model, (list, tuple, nn.ModuleList)):
        raise RuntimeError(
            f"model: expected a list of this rank's chunks of the model, got {type(model).__name__}"
        )
    models = list(model)
    model_type = get_model_type(inner_model(models[0]))
    if model_type is ModelType.encoder_and_decoder:
        raise RuntimeError("model: a model with encoder and decoder cannot be interleaved")
    rank = parallel_state.get_pipeline_model_parallel_rank()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    number = get_num_microbatches()
    plan = actions(rank, stages, len(models), number, forward_only)
    shapes = get_tensor_shapes(
        rank,
        model_type,
        tensor_shape=tensor_shape,
        sequence_parallel_enabled=sequence_parallel_enabled,
    )
    loop = Loop(
        forward_step_func,
        batch,
        models,
        Wire(shapes, shapes, async_comm),
        forward_only=forward_only,
        dtype=dtype,
        grad_scaler=grad_scaler,
        disable_autocast=disable_autocast,
        deallocate_pipeline_outputs=deallocate_pipeline_outputs,
    )
    return loop.run(plan, number)
