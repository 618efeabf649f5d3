"""Statistics of a batch that is spread over ranks, and the running averages of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .arrange import NAME
from .ops import welford_mean_var, welford_parallel


def group_size(process_group: dist.ProcessGroup | None) -> int:
    """Number of ranks of a group, None being the world; 1 without ``torch.distributed``.

    Raises:
        ValueError: this rank is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    size = dist.get_world_size(process_group)
    if size < 1:
        raise ValueError(
            f"{NAME}: rank {dist.get_rank()} is not in process_group; expected a group that this "
            "rank shares statistics with. Give every rank the group it is in, as "
            "create_syncbn_process_group does, or None for all ranks."
        )
    return size


def gather_statistics(
    mean: Tensor, biased_var: Tensor, count: int, process_group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Everybody's statistics, in one collective: ``[W, C]``, ``[W, C]`` and int64 ``[W]``.

    The counts are sent as the bits of an int64 among the floating-point numbers, because float32
    counts would be exact up to 2**24 only.
    """
    counts = torch.full((1,), count, dtype=torch.int64, device=mean.device)
    world_size = group_size(process_group)
    if world_size == 1:
        return mean[None], biased_var[None], counts
    mine = torch.cat([mean, biased_var, counts.view(mean.dtype)])
    theirs = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(theirs, mine, group=process_group)
    rows, channels = torch.stack(theirs), mean.numel()
    counts = rows[:, 2 * channels :].contiguous().view(torch.int64).flatten()
    means, biased_vars = rows[:, :channels], rows[:, channels : 2 * channels]
    return means.contiguous(), biased_vars.contiguous(), counts


def batch_statistics(
    x: Tensor, channel_last: bool, eps: float, process_group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, unbiased variance, inverse standard deviation and count over all ranks of a group.

    Args:
        x: contiguous, as the kernels read it; may be empty if another rank's is not.

    Returns:
        Three vectors ``[C]`` and the int64 ``[1]`` number of elements per channel.

    Raises:
        ValueError: on every rank, if there is a single element per channel on all together.
    """
    mean, biased_var = welford_mean_var(x, channel_last)
    count = x.numel() // mean.numel()
    means, biased_vars, counts = gather_statistics(mean, biased_var, count, process_group)
    total = counts if len(counts) == 1 else counts.sum().view(1)
    # With two elements here there is nothing to look up, which on a GPU would wait for it.
    if count < 2 and int(total) < 2:
        raise ValueError(
            f"{NAME}: expected more than 1 value per channel when training, got input size "
            f"{list(x.shape)} ({'channel last' if channel_last else 'channel second'}) and "
            f"{int(total)} values on all {group_size(process_group)} ranks."
        )
    mean, var, inv_std = welford_parallel(means, biased_vars, counts, eps)
    return mean, var, inv_std, total


def update_running(buffer: Tensor | None, value: Tensor, momentum: float) -> None:
    """``buffer = (1 - momentum) * buffer + momentum * value``, in place, rounded once."""
    if buffer is None:
        return
    if buffer.dtype == value.dtype:
        buffer.lerp_(value, momentum)
    else:
        buffer.copy_(torch.lerp(buffer.to(value.dtype), value, momentum))


def reduce_sums(
    sum_dy: Tensor, sum_dy_xmu: Tensor, process_group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Both sums added up over the group's ranks, in one collective; the arguments stay."""
    if group_size(process_group) == 1:
        return sum_dy, sum_dy_xmu
    both = torch.stack([sum_dy, sum_dy_xmu])
    dist.all_reduce(both, group=process_group)
    return both[0], both[1]
