"""The function that normalizes by statistics the caller has reduced; kept for its callers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .arrange import affine_vectors, arrangement_of, channels_of, check_operands
from .ops import batchnorm_forward, reduce_bn
from .over_ranks import (
    copy_of,
    given_statistics,
    input_gradient,
    once_only,
    refuse_batch_norm_transforms,
)
from .statistics import group_size


class SyncBatchnormFunction(Function):
    """``(input - mean) / sqrt(var + eps) * weight + bias`` with statistics of the whole group.

    The gradient treats ``running_mean`` and ``running_variance`` as functions of all ranks' inputs,
    and weights ranks by their number of elements.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor,
        running_variance: Tensor,
        eps: float,
        process_group: dist.ProcessGroup | None,
        world_size: int,
    ) -> Tensor:
        """Normalize ``input`` of shape ``[N, C, *]``.

        Args:
            running_mean, running_variance: ``[C]``, mean and biased variance over the group.
            process_group: None is the world.
            world_size: the group's size, which this function asks the group itself.
        """
        refuse_batch_norm_transforms()
        vectors = {"weight": weight, "bias": bias, "running_mean": running_mean}
        check_operands(input, None, vectors, channel_last=False)
        layout = ctx.layout = arrangement_of(input, channel_last=False)
        x = layout.arrange(input)
        mean, inv_std = given_statistics(running_mean, running_variance, eps, x.dtype)
        w, b = affine_vectors(x, channels_of(input, False), weight, bias)
        out = batchnorm_forward(x, None, mean, inv_std, w, b, layout.channel_last, False)
        ctx.save_for_backward(input, copy_of(input, x, layout), weight, mean, inv_std)
        ctx.process_group, ctx.bias_dtype = process_group, None if bias is None else bias.dtype
        return layout.output(out)

    @staticmethod
    @once_only
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias; the latter two of this rank's elements alone."""
        input, copy, weight, mean, inv_std = ctx.saved_tensors
        x = ctx.layout.arrange(input) if copy is None else copy
        dy = ctx.layout.arrange(grad_output.to(x.dtype))
        sums = reduce_bn(dy, x, mean, inv_std, ctx.layout.channel_last)
        sum_dy, sum_dy_xmu, grad_weight = sums
        grad_input = grad_bias = None
        if ctx.needs_input_grad[0]:
            count = torch.full((1,), x.numel() // mean.numel(), device=x.device)
            ctx.ranks = group_size(ctx.process_group)
            if ctx.ranks > 1:
                dist.all_reduce(count, group=ctx.process_group)
            w, _ = affine_vectors(x, mean.numel(), weight, None)
            grad_input = ctx.layout.restore(
                input_gradient(dy, x, mean, inv_std, w, sum_dy, sum_dy_xmu, count, ctx)
            )
        grad_weight = grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[2]:
            grad_bias = sum_dy.to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None
