"""Statistics of a batch that is spread over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class BatchKernels(NamedTuple):
    """The operators by which a package reduces a batch, as far as their arguments are the same."""

    of_one_rank: Any  # (x, running_mean, running_var, num_batches, eps, momentum, *layout)
    of_plain_rank: Callable[..., Any]  # the same without its frame: direct()
    moments: Any  # (x, *layout)
    merge: Any  # (means, biased_vars, counts, eps)


def batch_statistics(
    name: str,
    kernels: BatchKernels,
    x: Tensor,
    layout: tuple[bool, ...],
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    num_batches: Tensor | None,
    eps: float,
    momentum: float,
    process_group: dist.ProcessGroup | None,
    ranks: int,
    plain: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, inverse standard deviation and count over all ranks of a group; running ones updated.

    Args:
        name: of the caller, for messages.
        x: contiguous, as the kernels read it; may be empty if another rank's is not.
        layout: the kernels' last arguments; ``(False,)`` where channels are not last.
        running_mean, running_variance: ``[C]``, updated in place; None is left out.
        num_batches: gets one more in place; None is left out.
        momentum: share of the batch in the running statistics.
        ranks: how many ranks the group has.
        plain: what ``plainness()`` says of the call.

    Returns:
        Two vectors ``[C]`` and the int64 ``[1]`` number of elements per channel.

    Raises:
        ValueError: on every rank, if there is a single element per channel on all together;
            nothing is written then.
    """
    channel_last = layout != (False,)
    count = x.numel() // (x.shape[-1] if channel_last else x.shape[1])
    if ranks == 1:
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        if count < 2:
            raise _too_few(name, x, channel_last, count, ranks)
        fits = (
            running_mean is not None
            and running_variance is not None
            and running_mean.dtype == running_variance.dtype == dtype
            and running_mean.is_contiguous()
            and running_variance.is_contiguous()
            and (num_batches is None or num_batches.dtype is torch.int64)
            and (num_batches is None or num_batches.device == x.device)
        )
        given = (running_mean, running_variance, num_batches) if fits else (None, None, None)
        if fits and plain:  # without the Python that writes pass
            with torch._C._AutoDispatchBelowADInplaceOrView():
                made = kernels.of_plain_rank(x, *given, eps, momentum, *layout)
            torch._C._increment_version(given if num_batches is not None else given[:2])
            return made[0], made[2], made[3]
        with torch.no_grad():
            mean, var, inv_std, total = kernels.of_one_rank(x, *given, eps, momentum, *layout)
        if fits:
            return mean, inv_std, total
    else:
        mean, biased_var = kernels.moments(x, *layout)
        parts = gather_statistics(mean, biased_var, count, process_group, ranks)
        total = parts[2].sum().view(1)
        # With two elements here there is nothing to look up, which on a GPU would wait for it.
        if count < 2 and int(total) < 2:
            raise _too_few(name, x, channel_last, int(total), ranks)
        mean, var, inv_std = kernels.merge(*parts, eps)
    with torch.no_grad():
        update_running(running_mean, mean, momentum)
        update_running(running_variance, var, momentum)
        if num_batches is not None:
            num_batches.add_(1)
    return mean, inv_std, total


def _too_few(name: str, x: Tensor, channel_last: bool, total: int, ranks: int) -> ValueError:
    return ValueError(
        f"{name}: expected more than 1 value per channel when training, got input size "
        f"{list(x.shape)} ({'channel last' if channel_last else 'channel second'}) and {total} "
        f"values on all {ranks} ranks."
    )


def gather_statistics(
    mean: Tensor,
    biased_var: Tensor,
    count: int,
    process_group: dist.ProcessGroup | None,
    world_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Everybody's statistics, in one collective: ``[W, C]``, ``[W, C]`` and int64 ``[W]``.

    The counts are sent as the bits of an int64 among the floating-point numbers, because float32
    counts would be exact up to 2**24 only.

    Args:
        mean, biased_var, count: of this rank: ``[C]``, ``[C]``, and elements per channel.
        process_group: None is the world, of ``world_size`` ranks, W.
    """
    counts = torch.full((1,), count, dtype=torch.int64, device=mean.device)
    mine = torch.cat([mean, biased_var, counts.view(mean.dtype)])
    theirs = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(theirs, mine, group=process_group)
    rows, channels = torch.stack(theirs), mean.numel()
    counts = rows[:, 2 * channels :].contiguous().view(torch.int64).flatten()
    means, biased_vars = rows[:, :channels], rows[:, channels : 2 * channels]
    return means.contiguous(), biased_vars.contiguous(), counts


def update_running(buffer: Tensor | None, value: Tensor, momentum: float) -> None:
    """``buffer = (1 - momentum) * buffer + momentum * value``, in place, rounded once."""
    if buffer is None:
        return
    if buffer.dtype == value.dtype:
        buffer.lerp_(value, momentum)
    else:
        buffer.copy_(torch.lerp(buffer.to(value.dtype), value, momentum))


def reduce_sums(
    sum_dy: Tensor, sum_dy_xmu: Tensor, process_group: dist.ProcessGroup | None, world_size: int
) -> tuple[Tensor, Tensor]:
    """Both sums added up over the group's ranks, in one collective; the arguments stay."""
    if world_size == 1:
        return sum_dy, sum_dy_xmu
    both = torch.stack([sum_dy, sum_dy_xmu])
    dist.all_reduce(both, group=process_group)
    return both[0], both[1]
