"""The steps that all schedules are made of, and the making of a pipeline's models."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ... import parallel_state
from ...enums import ModelType
from ..p2p_communication import FutureTensor, device
from ..utils import get_model_type, get_num_microbatches, listify_model

__all__ = [
    "Batch",
    "FwdStepFunc",
    "LossFunc",
    "backward_step",
    "build_model",
    "custom_backward",
    "forward_step",
    "free_output_tensor",
]

Batch = Tensor | Sequence[Tensor] | None
"""What ``forward_step_func`` takes of a micro-batch: tensors, or None where a stage needs none."""
LossFunc = Callable[[Tensor], tuple[Tensor, Any]]
"""Takes a stage's output; returns the loss, and what is reported of it."""
FwdStepFunc = Callable[[Batch, nn.Module], tuple[Tensor, LossFunc]]
"""Takes a micro-batch and the model; returns the output, and the function that makes its loss."""
Tensors = Tensor | None | Sequence[Tensor | None]


def build_model(
    model_provider_func: Callable[..., nn.Module],
    wrap_with_ddp: bool = True,
    virtual_pipeline_model_parallel_size: int | None = None,
    model_type: ModelType = ModelType.encoder_or_decoder,
    *args: Any,
    **kwargs: Any,
) -> list[nn.Module]:
    """Make this rank's part of the model, or its parts if the pipeline is interleaved.

    Args:
        model_provider_func: called with ``args``, ``kwargs`` and the keywords ``pre_process`` and
            ``post_process``: whether this part has the model's (or the encoder's, or the
            decoder's) first and last layers. For a model with encoder and decoder also with
            ``add_encoder`` and ``add_decoder``.
        wrap_with_ddp: wrap each part in torch's ``DistributedDataParallel`` over the data-parallel
            group.
        virtual_pipeline_model_parallel_size: parts of the model on each rank.
        model_type: recorded as the parts' attribute ``model_type``.

    Returns:
        The parts, on the device of the pipeline's process group.

    Raises:
        RuntimeError: a model with encoder and decoder has no split rank, or is to be interleaved.
    """
    chunks = virtual_pipeline_model_parallel_size
    if chunks is None or parallel_state.get_pipeline_model_parallel_world_size() == 1:
        models = [model_provider_func(*args, **{**kwargs, **_ends(model_type)})]
    elif model_type is ModelType.encoder_and_decoder:
        raise RuntimeError("a model with encoder and decoder cannot be interleaved")
    else:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
        models = []
        for chunk in range(chunks):
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
            models.append(model_provider_func(*args, **{**kwargs, **_ends(model_type)}))
        parallel_state.set_virtual_pipeline_model_parallel_rank(0)
    where = device()
    for model in models:
        model.model_type = model_type  # type: ignore[assignment]
        model.to(where)
        _set_tensor_parallel_defaults(model)
    if parallel_state.get_data_parallel_rank() == 0:
        stage = parallel_state.get_pipeline_model_parallel_rank()
        tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        number = _calc_number_of_params(models)
        print(
            f"{number} parameters on stage {stage}, tensor-parallel rank {tensor_rank}", flush=True
        )
    return [_wrapped(model, where) for model in models] if wrap_with_ddp else models


def _ends(model_type: ModelType) -> dict[str, bool]:
    """What the provider is to add to this rank's part."""
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    if model_type is not ModelType.encoder_and_decoder:
        return ends
    rank = parallel_state.get_pipeline_model_parallel_rank()
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        split = parallel_state.get_pipeline_model_parallel_split_rank()
        if split is None:
            raise RuntimeError(
                "a model with encoder and decoder needs pipeline_model_parallel_split_rank_ in "
                "initialize_model_parallel"
            )
        ends["pre_process"] |= rank == split
        ends["post_process"] |= rank == split - 1
    return ends | {
        "add_encoder": parallel_state.is_pipeline_stage_before_split(),
        "add_decoder": parallel_state.is_pipeline_stage_after_split(),
    }


def _set_tensor_parallel_defaults(model: nn.Module) -> None:
    from ...tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes

    for param in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(param)


def _wrapped(model: nn.Module, where: torch.device) -> nn.Module:
    return nn.parallel.DistributedDataParallel(
        model,
        device_ids=None if where.type == "cpu" else [where],
        process_group=parallel_state.get_data_parallel_group(),
    )


def _calc_number_of_params(model: nn.Module | Sequence[nn.Module]) -> int:
    return sum(p.numel() for part in listify_model(model) for p in part.parameters())


def _get_params_for_weight_decay_optimization(
    model: nn.Module | Sequence[nn.Module],
    *,
    no_weight_decay_modules: tuple[type[nn.Module], ...] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two parameter groups: with weight decay, and without: biases, and parameters of norms.

    A parameter that several modules share is in the group of the first.

    Args:
        no_weight_decay_modules: classes of norms; by default ``apex.normalization.FusedLayerNorm``.
    """
    if no_weight_decay_modules is None:  # where it is not loaded, no module is one
        normalization = sys.modules.get("apex.normalization")
        no_weight_decay_modules = (normalization.FusedLayerNorm,) if normalization else ()
    decay: list[Tensor] = []
    no_decay: list[Tensor] = []
    seen: set[Tensor] = set()
    for module in nn.ModuleList(listify_model(model)).modules():
        is_norm = isinstance(module, no_weight_decay_modules)
        for name, param in module.named_parameters(recurse=False):
            if param not in seen:
                seen.add(param)
                (no_decay if is_norm or name == "bias" else decay).append(param)
    return {"params": decay}, {"params": no_decay, "weight_decay": 0.0}


def free_output_tensor(output_tensors: Tensors, deallocate_pipeline_outputs: bool = False) -> None:
    """Give an output's memory back after it was sent: backward needs its graph, not its values.

    Views and inputs that pass through keep theirs: others read it.
    """
    if not deallocate_pipeline_outputs:
        return
    for output in _listed(output_tensors):
        if output is not None and output._base is None and output.grad_fn is not None:
            output.data = torch.empty(1, dtype=output.dtype, device=output.device)


def custom_backward(output: Tensor, grad_output: Tensor | None) -> None:
    """Backward from an output whose memory may have been given back.

    ``torch.autograd.backward`` would compare the gradient's shape with that of the one element
    that is left, and would import sympy for it; the engine knows the shape from the graph.

    Args:
        output: the root; without ``grad_output``, of one element.
        grad_output: its gradient; by default 1. It may have another shape with as many elements:
            a stage gets it in the shape in which the next one took the output.

    Raises:
        RuntimeError: ``grad_output`` is None and ``output`` has more than one element.
    """
    if grad_output is None:
        if output.numel() != 1:
            raise RuntimeError(
                "grad_output: may be None for an output of one element only, "
                f"got an output of shape {list(output.shape)}"
            )
        grad_output = torch.ones_like(output)
    shape = _shape_in_graph(output)
    if grad_output.shape != shape and grad_output.numel() == shape.numel():
        grad_output = grad_output.reshape(shape)
    Variable._execution_engine.run_backward(
        (output,), (grad_output,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _shape_in_graph(output: Tensor) -> torch.Size:
    """The shape that ``output`` was computed with, even if its memory was given back."""
    if output.grad_fn is None:
        return output.shape
    metadata = output.grad_fn._input_metadata  # type: ignore[attr-defined]
    return torch.Size(metadata[output.output_nr].shape)


def inner_model(model: nn.Module) -> nn.Module:
    """The module that has ``set_input_tensor``, inside of wrappers that call theirs ``module``."""
    while not hasattr(model, "set_input_tensor") and isinstance(
        inside := getattr(model, "module", None), nn.Module
    ):
        model = inside
    return model


def forward_step(
    forward_step_func: FwdStepFunc,
    batch: Batch,
    model: nn.Module,
    input_tensor: Any,
    losses_reduced: list[Any],
    dtype: torch.dtype | None,
    disable_autocast: bool = False,
) -> Any:
    """One micro-batch through this rank's part of the model.

    Args:
        forward_step_func: called as ``(batch, model)``; returns the output and a function that
            makes ``(loss, reduced)`` of the last part's output.
        batch: the micro-batch.
        model: given the input by its ``set_input_tensor``.
        input_tensor: from the part before, or None, or a future; or a list of them.
        losses_reduced: the last part appends ``reduced``.
        dtype: float16 or bfloat16 for autocast; others mean none.
        disable_autocast: autocast for no dtype.

    Returns:
        The output; on the last part the loss, divided by the number of micro-batches. A decoder of
        a model with encoder and decoder passes on the encoder's output, too: a list of both.
    """
    inputs = [t.get() if isinstance(t, FutureTensor) else t for t in _listed(input_tensor)]
    inner = inner_model(model)
    inner.set_input_tensor(inputs)  # type: ignore[operator]
    autocast: Any = contextlib.nullcontext()
    if dtype in (torch.float16, torch.bfloat16) and not disable_autocast:
        where = next((p.device for p in model.parameters()), device())
        autocast = torch.autocast(where.type, dtype=dtype)
    with autocast:
        output, loss_func = forward_step_func(batch, model)
        if parallel_state.is_pipeline_last_stage():
            loss, reduced = loss_func(output)
            output = loss / get_num_microbatches()
            losses_reduced.append(reduced)
    if (
        get_model_type(inner) is ModelType.encoder_and_decoder
        and parallel_state.get_pipeline_model_parallel_world_size() > 1
        and parallel_state.is_pipeline_stage_after_split()
        and parallel_state.get_pipeline_model_parallel_split_rank() != 0  # there is an encoder
    ):
        return [output, inputs[-1]]
    return [output] if isinstance(input_tensor, list) else output


def backward_step(
    input_tensor: Any,
    output_tensor: Any,
    output_tensor_grad: Any,
    model_type: ModelType,
    *,
    grad_scaler: Any = None,
    deallocate_pipeline_outputs: bool = False,
) -> Any:
    """The backward of one :func:`forward_step`.

    Args:
        input_tensor: as ``forward_step`` got it, but no futures; or a list.
        output_tensor: what it returned; or a list.
        output_tensor_grad: its gradient, None for the last part's loss; or a list.
        model_type: for a decoder, the gradient of the encoder's output that was passed on is added
            to that of this part's use of it.
        grad_scaler: its ``scale`` multiplies the loss.
        deallocate_pipeline_outputs: has no effect: the output may always have been freed.

    Returns:
        The gradient of each input, None where there is none; a list if ``input_tensor`` is one.
    """
    inputs, outputs = _listed(input_tensor), _listed(output_tensor)
    grads = [g.get() if isinstance(g, FutureTensor) else g for g in _listed(output_tensor_grad)]
    for tensor in inputs:
        if tensor is not None:
            tensor.retain_grad()
    root, grad = outputs[0], grads[0]
    if grad is None and grad_scaler is not None:
        root = grad_scaler.scale(root)
    if grad is None or root.requires_grad:  # a part whose parameters are all frozen has no graph
        custom_backward(root, grad)
    result = [None if tensor is None else tensor.grad for tensor in inputs]
    if model_type is ModelType.encoder_and_decoder and len(grads) > 1 and grads[1] is not None:
        result[-1] = grads[1] if result[-1] is None else result[-1] + grads[1]
    return result if isinstance(input_tensor, list) else result[0]


def _listed(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
