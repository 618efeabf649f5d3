"""``x A^T + b`` whose backward overlaps communication with the weight's gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...parallel._shared.native.operands import autocast
from . import collectives
from .mappings import (
    _gather_along_first_dim,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)


class LinearWithGradAccumulationAndAsyncCommunication(torch.autograd.Function):
    """See :func:`linear_with_grad_accumulation_and_async_allreduce`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        async_grad_allreduce: bool,
        sequence_parallel_enabled: bool,
        use_16bit_in_wgrad_accum_fusion: bool = False,
    ) -> Tensor:
        if async_grad_allreduce and sequence_parallel_enabled:
            raise RuntimeError(
                "async_grad_allreduce: must be False with sequence_parallel_enabled, which adds "
                "the input's gradients over the ranks itself"
            )
        ctx.save_for_backward(input, weight)
        # Who has main_grad: asked in the backward, because a trainer may replace it until then.
        ctx.parameter = _parameter(weight) if gradient_accumulation_fusion else None
        ctx.in_16bit = use_16bit_in_wgrad_accum_fusion
        ctx.is_async, ctx.gathers = async_grad_allreduce, sequence_parallel_enabled
        whole = _gather_along_first_dim(input) if sequence_parallel_enabled else input
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable_gradients(ctx, input, weight, grad_output)
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dy = grad_output.reshape(-1, grad_output.shape[-1])
        whole = collectives.Pending("input", input)
        grad_input = grad_weight = grad_bias = None
        with torch.autocast(input.device.type, enabled=False):
            if ctx.gathers and needs_weight:
                whole = collectives.all_gather(input)
            if needs_input:
                shape = (*grad_output.shape[:-1], weight.shape[1])
                grad_input = collectives.Pending("gradient", dy.mm(weight).view(shape))
                if ctx.is_async:
                    grad_input = collectives.all_reduce(grad_input.result)
                elif ctx.gathers:
                    grad_input = collectives.reduce_scatter(grad_input.result)
            if needs_weight:
                x = whole.wait().reshape(-1, weight.shape[1])
                if ctx.parameter is None:
                    grad_weight = dy.t().mm(x)
                else:
                    _accumulate(x, dy, ctx.parameter, ctx.in_16bit)
            if needs_bias:
                grad_bias = dy.sum(0)
        grad_input = None if grad_input is None else grad_input.wait()
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _differentiable_gradients(
    ctx: Any, input: Tensor, weight: Tensor, grad_output: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients as functions of everything they depend on, for ``create_graph=True``."""
    if ctx.parameter is not None:
        raise RuntimeError(
            "gradient_accumulation_fusion: a gradient that is added to main_grad cannot be "
            "differentiated again; turn the fusion off"
        )
    with torch.autocast(input.device.type, enabled=False):
        whole = input
        if ctx.gathers:
            whole = gather_from_sequence_parallel_region(input)
        elif ctx.is_async:
            whole = copy_to_tensor_model_parallel_region(input)
        output = F.linear(whole, weight)
        bias_grad = grad_output.reshape(-1, weight.shape[0]).sum(0)
        needed = ctx.needs_input_grad[:2]
        wanted = [t for t, is_needed in zip((input, weight), needed, strict=True) if is_needed]
        grads = iter(torch.autograd.grad(output, wanted, grad_output, create_graph=True))
    first = [next(grads) if is_needed else None for is_needed in needed]
    return *first, bias_grad if ctx.needs_input_grad[2] else None, None, None, None, None


def _parameter(weight: Tensor) -> Tensor:
    """The parameter that ``weight`` is, or was cast from."""
    return getattr(weight, "_apex_cast_from", weight)


def _accumulate(x: Tensor, dy: Tensor, parameter: Tensor, in_16bit: bool) -> None:
    import fused_weight_gradient_mlp_cuda as extension

    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None:
        raise RuntimeError(
            "gradient_accumulation_fusion: the weight has no main_grad. Set weight.main_grad to a "
            f"tensor of shape {list(parameter.shape)} before the backward."
        )
    function = "wgrad_gemm_accum_fp16" if in_16bit else "wgrad_gemm_accum_fp32"
    getattr(extension, function)(x, dy, main_grad)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None, *options: bool) -> Tensor:
    parameter = weight
    input, weight, bias = autocast(input, weight, bias)
    if weight is not parameter:
        weight._apex_cast_from = parameter
    return LinearWithGradAccumulationAndAsyncCommunication.apply(input, weight, bias, *options)


def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    async_grad_allreduce: bool,
    sequence_parallel_enabled: bool,
) -> Tensor:
    """``input @ weight.T + bias``, with communication behind the weight's gradient.

    Args:
        input: ``[*, in_features]``; with ``sequence_parallel_enabled`` this rank's part of the
            first dimension.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]`` or None.
        gradient_accumulation_fusion: add the weight's gradient to ``weight.main_grad``, float32,
            and return none.
        async_grad_allreduce: add the input's gradient over the tensor-parallel ranks, while the
            weight's is computed.
        sequence_parallel_enabled: gather the input first; in the backward gather it again and
            scatter the sum of its gradients, while products are computed.

    Under autocast all three are cast to its dtype.

    Raises:
        RuntimeError: both kinds of communication are asked for, ``main_grad`` is missing, or a
            gradient that was added to ``main_grad`` is differentiated again.
    """
    options = gradient_accumulation_fusion, async_grad_allreduce, sequence_parallel_enabled
    return _linear(input, weight, bias, *options, False)


def linear_with_grad_accumulation_and_async_allreduce_in16bit(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    async_grad_allreduce: bool,
    sequence_parallel_enabled: bool,
) -> Tensor:
    """The same with ``weight.main_grad`` in the 16-bit dtype of the weight."""
    options = gradient_accumulation_fusion, async_grad_allreduce, sequence_parallel_enabled
    return _linear(input, weight, bias, *options, True)
