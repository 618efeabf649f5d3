"""Apex's import path of the autograd function of SyncBatchNorm."""

from .syncbn.over_ranks import SyncBatchnormFunction

__all__ = ["SyncBatchnormFunction"]
