"""Batch normalization with the statistics of a group of ranks: the function and its gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .._shared.native.once_differentiable import not_twice_differentiable
from .._shared.native.operands import FLOATS, check_floating, exact, statistics_dtype
from .._shared.native.plain import apply_of, direct, plainness
from .._shared.native.rank_statistics import BatchKernels, batch_statistics, reduce_sums
from .._shared.native.transforms import refuse_transforms
from . import ops

_KERNELS = BatchKernels(ops.statistics, direct(ops.statistics), ops.moments, ops.merge)
_REMEDY = "Use torch.nn.BatchNorm2d, or the like, there."


class _Normalize(Function):
    """By given statistics; the gradient takes them for those of ``count`` rows, of all ranks.

    Without ``count`` they are constants.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        z: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        inv_std: Tensor,
        count: Tensor | None,
        relu: bool,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        y = ops.forward(x, z, mean, inv_std, weight, bias, relu)
        ctx.save_for_backward(x, weight, mean, inv_std, count, y if relu else None)
        ctx.group = group
        return y

    @staticmethod
    @not_twice_differentiable("group batch norm", _REMEDY)
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, z, weight and bias; the latter two of this rank's rows alone."""
        x, weight, mean, inv_std, count, y = ctx.saved_tensors
        given = dy.contiguous(), x, weight, mean, inv_std, count, y
        dx, dz, dweight, dbias = gradients(*given, ctx.group, ctx.needs_input_grad[0])
        return dx, dz if ctx.needs_input_grad[1] else None, dweight, dbias, *[None] * 5


def _plain_forward(ctx: Any, x: Tensor, z: Tensor | None, *rest: Any) -> Tensor:
    weight, bias, mean, inv_std, count, relu, ctx.group = rest
    y = _run_forward(x, z, mean, inv_std, weight, bias, relu)
    ctx.to_save = (x, weight, mean, inv_std, count, y if relu else None)
    return y


@not_twice_differentiable("group batch norm", _REMEDY, plain=True)
def _plain_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, mean, inv_std, count, y = ctx.saved_tensors
    dy, needs = dy.contiguous(), ctx.needs_input_grad
    if count is None:  # constant statistics
        dx, masked, dweight, dbias = gradients(dy, x, weight, mean, inv_std, None, y, None)
    else:
        if needs[0]:
            masked, dx, dbias, dweight = _run_all(dy, x, y, mean, inv_std, weight, count)
        else:
            masked, dbias, _, dweight = ops.sums(dy, x, y, mean, inv_std)
            dx = None
        masked = dy if y is None else masked
    return dx, masked if needs[1] else None, dweight, dbias, None, None, None, None, None


_run_forward, _run_all = direct(ops.forward), direct(ops.gradients)
_apply_plain = apply_of("group batch norm", _plain_forward, _plain_backward, _Normalize.backward)
"""``_Normalize.apply`` of plain calls without a group."""


def gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    inv_std: Tensor,
    count: Tensor | None,
    y: Tensor | None,
    group: dist.ProcessGroup | None,
    needs_x: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Gradients of x, z, weight and bias; the latter two of this rank's rows alone.

    ``count`` is None where the statistics are constants, ``y`` where there is no ReLU.
    """
    if needs_x and count is not None and size_of(group) == 1:
        masked, dx, sum_dy, weight_grad = ops.gradients(dy, x, y, mean, inv_std, weight, count)
        return dx, dy if y is None else masked, weight_grad, sum_dy
    masked, sum_dy, sum_dy_xmu, weight_grad = ops.sums(dy, x, y, mean, inv_std)
    dz = dy if y is None else masked
    dx = None
    if needs_x:
        if count is None:
            of_all = torch.zeros_like(mean), torch.zeros_like(mean)
            count = torch.ones(1, dtype=torch.int64, device=x.device)
        else:
            of_all = reduce_sums(sum_dy, sum_dy_xmu, group, size_of(group))
        dx = ops.backward(dz, x, mean, inv_std, weight, *of_all, count)
    return dx, dz, weight_grad, sum_dy


def rows_of_all(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """int64 ``[1]``: the rows of all ranks."""
    count = torch.full((1,), x.numel() // x.shape[-1], device=x.device)
    if size_of(group) > 1:
        dist.all_reduce(count, group=group)
    return count


def size_of(group: dist.ProcessGroup | None) -> int:
    """Number of ranks; None is this rank alone."""
    return 1 if group is None else dist.get_world_size(group)


# By size. No lock: ranks make groups in one order, so in one thread.
_made: dict[int, tuple[dist.ProcessGroup | None, dist.ProcessGroup]] = {}


def group_of(name: str, size: int) -> dist.ProcessGroup | None:
    """The group of ``size`` consecutive ranks that this rank is in; None for 1.

    All ranks must make the first call for a size; later ones find the group.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialized.
        ValueError: ``size`` is not positive, or does not divide the number of ranks.
    """
    if size == 1:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{name} is {size}, but torch.distributed is not initialized: call "
            "torch.distributed.init_process_group() first, or pass 1."
        )
    world = dist.get_world_size()
    if size < 1 or world % size:
        raise ValueError(f"{name} must divide the number of ranks, {world}; got {size}.")
    of_all = dist.group.WORLD
    if size == world:
        return of_all
    if size not in _made or _made[size][0] is not of_all:  # or initialized anew
        mine, rank = None, dist.get_rank()
        for first in range(0, world, size):
            group = dist.new_group(list(range(first, first + size)))
            mine = group if first <= rank < first + size else mine
        assert mine is not None
        _made[size] = of_all, mine
    return _made[size][1]


def group_batch_norm(
    name: str,
    x: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    momentum: float,
    from_batch: bool,
    relu: bool,
    group: dist.ProcessGroup | None,
    num_batches: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize ``x`` ``[*, C]``, add ``z`` and take the positive part if ``relu``.

    Args:
        name: of the caller, for messages.
        x: float64, float32, float16 or bfloat16; ``z`` as ``x``.
        weight, bias: ``[C]``; None for 1 and 0.
        running_mean, running_var: with ``from_batch`` they take ``momentum`` of the batch's
            statistics, or are None; else they are the statistics.
        group: the ranks whose rows are one batch; None for this rank's.
        num_batches: with ``from_batch`` it gets one more, unless it is None.

    Returns:
        The output, like ``x``; mean and inverse standard deviation, in float32 at least.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit, or there is a single row in training.
    """
    is_plain = plainness(x, z, weight, bias, running_mean, running_var, num_batches)
    if not is_plain:
        refuse_transforms(name, _REMEDY)
    check(name, x, z, {"weight": weight, "bias": bias, "running_mean": running_mean})
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    x, z = x.contiguous(), None if z is None else z.contiguous()
    if from_batch:
        running = running_mean, running_var, num_batches
        given = *running, eps, momentum, group, 1 if group is None else size_of(group), is_plain
        mean, inv_std, count = batch_statistics(name, _KERNELS, x.detach(), (), *given)
    elif running_mean is None or running_var is None:
        raise ValueError(f"{name}: there are no running statistics to normalize by.")
    else:
        with torch.no_grad():
            count, mean = None, exact(running_mean, dtype).clone()
            inv_std = torch.rsqrt(running_var.to(dtype) + eps)
    w = x.new_ones(x.shape[-1], dtype=dtype) if weight is None else weight.to(dtype).contiguous()
    b = x.new_zeros(x.shape[-1], dtype=dtype) if bias is None else bias.to(dtype).contiguous()
    apply = _apply_plain if is_plain and group is None else _Normalize.apply
    return apply(x, z, w, b, mean, inv_std, count, relu, group), mean, inv_std


def frozen(x: Tensor, z: Tensor | None, scale: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """``x * scale + bias + z``, and its positive part if ``relu``, in one pass in each direction.

    ``x`` and ``z`` are contiguous ``[*, C]``; ``scale`` and ``bias`` are constants ``[C]``.
    """
    refuse_transforms("frozen batch norm", "Use plain PyTorch there: use_cudnn=False.")
    dtype = statistics_dtype(x.dtype)
    scale, bias = (exact(vector.detach(), dtype) for vector in (scale, bias))
    zeros, ones = torch.zeros_like(scale), torch.ones_like(scale)
    return _Normalize.apply(x, z, scale, bias, zeros, ones, None, relu, None)


def check(name: str, x: Tensor, z: Tensor | None, vectors: dict[str, Tensor | None]) -> None:
    """Raise TypeError or ValueError for what :func:`group_batch_norm` does not take."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATS or x.layout is not torch.strided:
        check_floating(name, "x", x)
    if x.dim() < 2 or x.shape[-1] == 0:
        raise ValueError(f"{name}: x must be rows of channels, got {list(x.shape)}.")
    if z is not None and (z.shape != x.shape or z.dtype != x.dtype or z.device != x.device):
        raise (TypeError if z.dtype != x.dtype else ValueError)(
            f"{name}: z is {z.dtype} {list(z.shape)} on {z.device}, but x is {x.dtype} "
            f"{list(x.shape)} on {x.device}; they are added."
        )
    for argument, vector in vectors.items():
        if vector is None:
            continue
        if vector.shape != x.shape[-1:] or vector.device != x.device:
            raise ValueError(
                f"{name}: {argument} must be one number for each of the {x.shape[-1]} channels of "
                f"x, on {x.device}; got {list(vector.shape)} on {vector.device}."
            )
        if not vector.is_floating_point():
            raise TypeError(f"{name}: {argument} must be floating-point, got {vector.dtype}.")


def momentum_now(momentum: float | None, batches: Tensor | None) -> float:
    """The share of this batch in the running statistics; for None, that of an average of all."""
    if momentum is not None:
        return momentum
    return 1.0 / (float(batches) + 1.0) if batches is not None else 0.0
