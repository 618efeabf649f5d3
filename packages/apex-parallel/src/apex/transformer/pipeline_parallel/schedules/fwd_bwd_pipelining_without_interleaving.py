"""The schedule of a pipeline whose ranks hold one part of the model each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ... import parallel_state
from ...enums import ModelType
from ...utils import divide
from .. import p2p_communication
from ..p2p_communication import Options, Received
from ..utils import get_model_type, get_num_microbatches, listify_model
from .actions import actions
from .common import Batch, FwdStepFunc, Tensors, inner_model
from .loop import Loop, Wire

if TYPE_CHECKING:  # of typing, since Python 3.11
    from typing_extensions import Unpack

__all__ = ["forward_backward_pipelining_without_interleaving", "get_tensor_shapes"]

Shapes = list[tuple[int, ...]]


def forward_backward_pipelining_without_interleaving(
    forward_step_func: FwdStepFunc,
    batch: Batch,
    model: nn.Module | Sequence[nn.Module],
    *,
    forward_only: bool,
    tensor_shape: Sequence[int] | None = None,
    decoder_sequence_length: int | None = None,
    dtype: torch.dtype | None = None,
    grad_scaler: Any = None,
    disable_autocast: bool = False,
    deallocate_pipeline_outputs: bool = False,
    async_comm: bool = False,
    sequence_parallel_enabled: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Run all micro-batches of one training step: one forward, one backward.

    Stage ``r`` of ``n`` begins with ``n - 1 - r`` forwards and never keeps the activations of more
    than ``n - r`` micro-batches. Torch's ``DistributedDataParallel`` reduces gradients in the last
    backward alone.

    Args:
        forward_step_func: called as ``(micro_batch, model)``; returns the output and a function
            that makes ``(loss, reduced)`` of the last stage's output.
        batch: a list of tensors (or one tensor, or None) whose rows are this rank's samples, one
            micro-batch after the other.
        model: this stage's module, with ``set_input_tensor``, or a list with it.
        forward_only: no backward.
        tensor_shape: ``(sequence, micro-batch, hidden)`` of what stages hand on; must be given. The
            next stage receives an output of another shape with as many numbers in this shape. With
            sequence parallelism each tensor-parallel rank hands on its part of the first dimension.
        decoder_sequence_length: the first dimension from the split rank on, where the encoder's
            output, of the first dimension of ``tensor_shape``, is handed on as well.
        dtype: dtype of what stages hand on, by default float32; values are cast to it. float16 and
            bfloat16 turn autocast on, too.
        grad_scaler: its ``scale`` multiplies each loss, on the last stage. Every stage then calls
            its ``step`` and ``update``; with :class:`apex.transformer.amp.GradScaler` stages skip a
            step together.
        disable_autocast: leave autocast as it is.
        deallocate_pipeline_outputs: free each output's memory when it has been sent: backward needs
            the graph only.
        async_comm: wait for what is received where it is needed, and for what is sent before the
            next transfer; by default each transfer ends before the computation goes on.
        sequence_parallel_enabled: see ``tensor_shape``.
        kwargs: what only the other schedules use.

    Returns:
        On the last stage, what each micro-batch's loss function has reduced; elsewhere ``[]``.

    Raises:
        RuntimeError: ``tensor_shape`` is None; ``model`` is a list of another length; the stages'
            arguments do not fit together; or another stage has died, raised an error, or not
            answered within the timeout of the process group.
        ValueError: a shape is not as it should be.
    """
    models = listify_model(model)
    if len(models) != 1:
        raise RuntimeError(f"model: expected this stage's one module, got {len(models)}")
    rank = parallel_state.get_pipeline_model_parallel_rank()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    recv_shapes, send_shapes = (
        get_tensor_shapes(
            stage,
            get_model_type(inner_model(models[0])),
            tensor_shape=tensor_shape,
            decoder_sequence_length=decoder_sequence_length,
            sequence_parallel_enabled=sequence_parallel_enabled,
        )
        for stage in (rank - 1, rank)
    )
    loop = Loop(
        forward_step_func,
        batch,
        models,
        Wire(recv_shapes, send_shapes, async_comm),
        forward_only=forward_only,
        dtype=dtype,
        grad_scaler=grad_scaler,
        disable_autocast=disable_autocast,
        deallocate_pipeline_outputs=deallocate_pipeline_outputs,
    )
    number = get_num_microbatches()
    return loop.run(actions(rank, stages, 1, number, forward_only), number)


def get_tensor_shapes(
    rank: int,
    model_type: ModelType,
    *,
    tensor_shape: Sequence[int] | None,
    decoder_sequence_length: int | None = None,
    sequence_parallel_enabled: bool = False,
) -> Shapes:
    """Shapes of the tensors that stage ``rank`` hands on; see the arguments of the schedule.

    A decoder's stage hands on two: the decoder's, then the encoder's. If the whole pipeline belongs
    to the decoder, there is no encoder's.

    Raises:
        RuntimeError: ``tensor_shape`` is None.
        ValueError: it has not three dimensions, a sequence cannot be divided over the
            tensor-parallel ranks, or the decoder's length is missing.
    """
    if tensor_shape is None:
        raise RuntimeError("tensor_shape: must be given, as (sequence, micro-batch, hidden)")
    if len(tensor_shape) != 3:
        raise ValueError(
            "tensor_shape: expected three dimensions, sequence, micro-batch and hidden; "
            f"got {tuple(tensor_shape)}"
        )
    parts = (
        parallel_state.get_tensor_model_parallel_world_size() if sequence_parallel_enabled else 1
    )
    sequence, *rest = tensor_shape
    lengths = {"tensor_shape": sequence}
    is_split = model_type is ModelType.encoder_and_decoder
    if is_split and not parallel_state.is_pipeline_stage_before_split(rank):
        if decoder_sequence_length is None:
            raise ValueError("decoder_sequence_length: must be given for the decoder's stages")
        has_encoder = parallel_state.get_pipeline_model_parallel_split_rank() != 0
        decoder = {"decoder_sequence_length": decoder_sequence_length}
        lengths = decoder | lengths if has_encoder else decoder
    parallel = "with sequence_parallel_enabled, a sequence"
    by = "tensor-parallel ranks"
    return [
        (divide(length, parts, what=f"{name}: {parallel}", by=by), *rest)
        for name, length in lengths.items()
    ]


def recv_forward(tensor_shapes: Shapes, **options: Unpack[Options]) -> list[Received]:
    """:func:`.p2p_communication.recv_forward` for each shape."""
    return [p2p_communication.recv_forward(shape, **options) for shape in tensor_shapes]


def recv_backward(tensor_shapes: Shapes, **options: Unpack[Options]) -> list[Received]:
    """:func:`.p2p_communication.recv_backward` for each shape."""
    return [p2p_communication.recv_backward(shape, **options) for shape in tensor_shapes]


def send_forward(
    output_tensors: Tensors, tensor_shapes: Shapes, **options: Unpack[Options]
) -> None:
    """:func:`.p2p_communication.send_forward` for each tensor that is not None."""
    _for_each(p2p_communication.send_forward, output_tensors, tensor_shapes, options)


def send_backward(
    input_tensor_grads: Tensors, tensor_shapes: Shapes, **options: Unpack[Options]
) -> None:
    """:func:`.p2p_communication.send_backward` for each gradient that is not None."""
    _for_each(p2p_communication.send_backward, input_tensor_grads, tensor_shapes, options)


def send_forward_recv_backward(
    output_tensors: Tensors, tensor_shapes: Shapes, **options: Unpack[Options]
) -> list[Received]:
    """:func:`.p2p_communication.send_forward_recv_backward` for each tensor that is not None."""
    function = p2p_communication.send_forward_recv_backward
    return _for_each(function, output_tensors, tensor_shapes, options)


def send_backward_recv_forward(
    input_tensor_grads: Tensors, tensor_shapes: Shapes, **options: Unpack[Options]
) -> list[Received]:
    """:func:`.p2p_communication.send_backward_recv_forward` for each gradient that is not None."""
    function = p2p_communication.send_backward_recv_forward
    return _for_each(function, input_tensor_grads, tensor_shapes, options)


def _for_each(
    send: Callable[..., Any], tensors: Tensors, shapes: Shapes, options: Options
) -> list[Any]:
    tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    pairs = zip(tensors, shapes, strict=True)
    return [None if t is None else send(t, tensor_shape=shape, **options) for t, shape in pairs]
