"""Import path of SyncBatchNorm without the compiled module; there is one implementation now."""

from .optimized_sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
