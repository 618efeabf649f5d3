"""Statistics of a batch that is spread over the ranks of a process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


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
        process_group: None is the world; it is not used where ``world_size``, W, is 1.
    """
    counts = torch.full((1,), count, dtype=torch.int64, device=mean.device)
    if world_size == 1:
        return mean[None], biased_var[None], counts
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
