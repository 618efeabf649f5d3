"""The autograd function of SyncBatchNorm: statistics over ranks, normalization, gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .._shared.native.once_differentiable import not_twice_differentiable
from .._shared.native.operands import statistics_dtype
from .._shared.native.plain import NOT_PLAIN, WITH_GRADIENT, apply_of, direct, plainness
from .._shared.native.rank_statistics import batch_statistics, reduce_sums
from .._shared.native.transforms import refuse_transforms
from .arrange import (
    NAME,
    Arrangement,
    affine_vectors,
    arrangement_of,
    check_operands,
)
from .ops import (
    batchnorm_backward,
    batchnorm_forward,
    batchnorm_gradients,
    reduce_bn,
    relu_bw,
)
from .statistics import KERNELS, group_size


def refuse_batch_norm_transforms() -> None:
    """Raise within ``torch.func``: for the first line of a function's ``forward``."""
    refuse_transforms(NAME, "Use torch.nn.BatchNorm2d, or the like, there.")


def once_only(backward: Callable, plain: bool = False) -> Callable:
    """Decorate a function's ``backward``: its gradients raise where they are differentiated."""
    remedy = "Use torch.nn.BatchNorm2d, or the like, where a second derivative is needed."
    return not_twice_differentiable(NAME, remedy, plain)(backward)


class SyncBatchnormFunction(Function):
    """Batch normalization over all ranks of a process group, with an added input and ReLU.

    ``out = (input - mean) * inv_std * weight + bias + z``, then its positive part if
    ``fuse_relu``. :class:`~apex.parallel.SyncBatchNorm` says what the arguments are.

    Source:
        Ioffe & Szegedy, *Batch Normalization*, 2015; statistics of parts are merged by Chan, Golub
        & LeVeque, *Algorithms for computing the sample variance*, 1983.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        z: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_variance: Tensor | None,
        eps: float,
        track_running_stats: bool = True,
        momentum: float = 1.0,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
        num_batches: Tensor | None = None,
    ) -> Tensor:
        """Normalize ``input``.

        Args:
            track_running_stats: use the statistics of the batch, and update the running ones where
                they are not None. If False, normalize by the running ones.
            momentum: share of the batch in the new running statistics.
            num_batches: gets one more where the statistics of the batch are used.
        """
        if not (plain := plainness()):
            refuse_batch_norm_transforms()
        vectors = weight, bias, running_mean, running_variance
        options = eps, track_running_stats, momentum, process_group, channel_last, fuse_relu
        return _normalize(plain, ctx, input, z, *vectors, *options, num_batches)

    @staticmethod
    @once_only
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, z, weight and bias; the latter two of this rank's elements alone."""
        return _gradients(ctx, grad_output, NOT_PLAIN)


def _normalize(plain: int, ctx: Any, input: Tensor, z: Tensor | None, *rest: Any) -> Tensor:
    weight, bias, running_mean, running_variance, eps, from_batch, momentum, group, *rest = rest
    channel_last, fuse_relu, num_batches = rest
    channel_last = channel_last or input.dim() == 2
    vectors = {
        "weight": weight,
        "bias": bias,
        "running_mean": running_mean,
        "running_variance": running_variance,
    }
    channels = check_operands(input, z, vectors, channel_last)
    layout = ctx.layout = arrangement_of(input, channel_last)
    moves, last = layout.moved or layout.flattened is not None, layout.channel_last
    x = layout.arrange(input) if moves else input.contiguous()
    added, count = None if z is None else layout.arrange(z), None
    if from_batch:
        ranks = ctx.ranks = group_size(group)
        given = running_mean, running_variance, num_batches, eps, momentum, group, ranks, plain
        mean, inv_std, count = batch_statistics(NAME, KERNELS, x, (last,), *given)
    else:
        mean, inv_std = given_statistics(running_mean, running_variance, eps, x.dtype)
    if weight is None or bias is None:
        w, b = affine_vectors(x, channels, weight, bias)
    else:
        w, b = weight.to(mean.dtype).contiguous(), bias.to(mean.dtype).contiguous()
    run = _run_forward if plain else batchnorm_forward
    out = run(x, added, mean, inv_std, w, b, last, fuse_relu)
    kept = input, None if x is input else copy_of(input, x, layout), weight, mean, inv_std, count
    kept = (*kept, *((bias, added) if fuse_relu else (None, None)))
    if plain:
        ctx.to_save = kept  # as save_for_backward() does
    else:
        ctx.save_for_backward(*kept)
    ctx.process_group, ctx.fuse_relu = group, fuse_relu
    ctx.bias_dtype = None if bias is None else bias.dtype
    return layout.output(out) if moves else out


def _gradients(ctx: Any, dy: Tensor, plain: int = WITH_GRADIENT) -> tuple[Tensor | None, ...]:
    run_sums, run_all = _RUN_BACKWARD if plain else (reduce_bn, batchnorm_gradients)
    input, copy, weight, mean, inv_std, count, bias, added = ctx.saved_tensors
    layout, needs = ctx.layout, ctx.needs_input_grad
    moves, last = layout.moved or layout.flattened is not None, layout.channel_last
    dy = dy if plain else dy.to(input.dtype)
    dy = layout.arrange(dy) if moves else dy.contiguous()
    x = copy
    if copy is None:
        x = layout.arrange(input) if moves else input
    w = torch.ones_like(mean) if weight is None else weight.to(mean.dtype).contiguous()
    if ctx.fuse_relu:
        b = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype).contiguous()
        dy = relu_bw(dy, x, added, mean, inv_std, w, b, last)
    dx = grad_bias = None
    if needs[0] and count is not None and ctx.ranks == 1:
        dx, sum_dy, grad_weight = run_all(dy, x, mean, inv_std, w, count, last)
    else:
        sum_dy, sum_dy_xmu, grad_weight = run_sums(dy, x, mean, inv_std, last)
        if needs[0]:
            dx = input_gradient(dy, x, mean, inv_std, w, sum_dy, sum_dy_xmu, count, ctx)
    if dx is not None and moves:
        dx = layout.restore(dx)
    grad_weight = grad_weight.to(weight.dtype) if needs[2] else None
    if needs[3]:
        grad_bias = sum_dy.to(ctx.bias_dtype)
    dz = layout.restore(dy) if needs[1] else None
    return dx, dz, grad_weight, grad_bias, *[None] * 9


_run_forward = direct(batchnorm_forward)
_RUN_BACKWARD = direct(reduce_bn), direct(batchnorm_gradients)
apply_plain = apply_of(
    SyncBatchnormFunction.__name__,
    functools.partial(_normalize, WITH_GRADIENT),
    once_only(_gradients, plain=True),
    SyncBatchnormFunction.backward,
)
"""``SyncBatchnormFunction.apply`` of plain calls, with all arguments."""


def copy_of(input: Tensor, x: Tensor, layout: Arrangement) -> Tensor | None:
    """``x``, which is ``input`` arranged, if that took a copy: backward need not make another."""
    return None if layout.moved or input.is_contiguous() else x


def given_statistics(
    mean: Tensor | None, variance: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation of given (running) statistics."""
    if mean is None or variance is None:
        raise ValueError(
            "SyncBatchNorm: running_mean and running_variance are None; they are needed where the "
            "statistics of the batch are not used."
        )
    dtype = statistics_dtype(dtype)
    return mean.to(dtype).contiguous(), torch.rsqrt(variance.to(dtype) + eps)


def input_gradient(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor | None,
    ctx: Any,
) -> Tensor:
    """Gradient of the input, for statistics of ``count`` elements, or constant ones if None."""
    if count is None:
        count = torch.ones(1, dtype=torch.int64, device=x.device)
        sum_dy = sum_dy_xmu = torch.zeros_like(mean)
    else:
        sum_dy, sum_dy_xmu = reduce_sums(sum_dy, sum_dy_xmu, ctx.process_group, ctx.ranks)
    return batchnorm_backward(
        dy, x, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, ctx.layout.channel_last
    )
