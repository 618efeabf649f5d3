"""Data parallelism over torch.distributed: gradient buckets and synchronised batch norm."""

from torch.distributed import ReduceOp

from .distributed import DistributedDataParallel, Reducer
from .optimized_sync_batchnorm import SyncBatchNorm
from .syncbn.conversion import convert_syncbn_model, create_syncbn_process_group

__all__ = [
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
