"""Statistics of a batch that is spread over ranks."""

from __future__ import annotations

import torch.distributed as dist

from .._shared.native.plain import direct
from .._shared.native.rank_statistics import BatchKernels
from . import ops
from .arrange import NAME

KERNELS = BatchKernels(
    ops.batch_statistics,
    direct(ops.batch_statistics),
    ops.welford_mean_var,
    ops.welford_parallel,
)
_HAS_RANKS = dist.is_available()  # a fact of how torch was built


def group_size(process_group: dist.ProcessGroup | None) -> int:
    """Number of ranks of a group, None being the world; 1 without ``torch.distributed``.

    Raises:
        ValueError: this rank is not in the group.
    """
    if not _HAS_RANKS or dist.distributed_c10d._world.default_pg is None:  # is_initialized()
        return 1
    size = dist.get_world_size(process_group)
    if size < 1:
        raise ValueError(
            f"{NAME}: rank {dist.get_rank()} is not in process_group; expected a group that this "
            "rank shares statistics with. Give every rank the group it is in, as "
            "create_syncbn_process_group does, or None for all ranks."
        )
    return size
