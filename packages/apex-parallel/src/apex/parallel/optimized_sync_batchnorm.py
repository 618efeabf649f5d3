"""Apex's import path of SyncBatchNorm."""

from .optimized_sync_batchnorm_kernel import SyncBatchnormFunction
from .syncbn.module import SyncBatchNorm

__all__ = ["SyncBatchNorm", "SyncBatchnormFunction"]
