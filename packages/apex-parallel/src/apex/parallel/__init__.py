"""Data parallelism over torch.distributed: gradient buckets and synchronised batch norm."""

from sys import argv as _argv

if _argv[:1] == ["-m"]:  # the doctor may be asked, which answers without torch too
    from ._shared.native.doctor_torch import answer_without_torch as _answer

    _answer(__name__)

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
