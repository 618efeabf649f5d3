"""Statistics of a batch that is spread over ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from .._shared.native.rank_statistics import gather_statistics
from .arrange import NAME
from .ops import welford_mean_var, welford_parallel

_HAS_RANKS = dist.is_available()  # a fact of how torch was built


def group_size(process_group: dist.ProcessGroup | None) -> int:
    """Number of ranks of a group, None being the world; 1 without ``torch.distributed``.

    Raises:
        ValueError: this rank is not in the group.
    """
    if not (_HAS_RANKS and dist.is_initialized()):
        return 1
    size = dist.get_world_size(process_group)
    if size < 1:
        raise ValueError(
            f"{NAME}: rank {dist.get_rank()} is not in process_group; expected a group that this "
            "rank shares statistics with. Give every rank the group it is in, as "
            "create_syncbn_process_group does, or None for all ranks."
        )
    return size


def batch_statistics(
    x: Tensor, channel_last: bool, eps: float, process_group: dist.ProcessGroup | None, ranks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, unbiased variance, inverse standard deviation and count over all ranks of a group.

    Args:
        x: contiguous, as the kernels read it; may be empty if another rank's is not.
        ranks: how many ranks the group has.

    Returns:
        Three vectors ``[C]`` and the int64 ``[1]`` number of elements per channel.

    Raises:
        ValueError: on every rank, if there is a single element per channel on all together.
    """
    mean, biased_var = welford_mean_var(x, channel_last)
    count = x.numel() // mean.numel()
    gathered = gather_statistics(mean, biased_var, count, process_group, ranks)
    means, biased_vars, counts = gathered
    total = counts if ranks == 1 else counts.sum().view(1)
    # With two elements here there is nothing to look up, which on a GPU would wait for it.
    if count < 2 and int(total) < 2:
        raise ValueError(
            f"{NAME}: expected more than 1 value per channel when training, got input size "
            f"{list(x.shape)} ({'channel last' if channel_last else 'channel second'}) and "
            f"{int(total)} values on all {ranks} ranks."
        )
    mean, var, inv_std = welford_parallel(means, biased_vars, counts, eps)
    return mean, var, inv_std, total
