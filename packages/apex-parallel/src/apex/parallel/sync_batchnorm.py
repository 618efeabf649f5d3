"""Import path of SyncBatchNorm without the compiled module; there is one implementation now."""

from .syncbn.module import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
