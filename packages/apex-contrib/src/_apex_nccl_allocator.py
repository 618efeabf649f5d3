"""Apex's extension module of NCCL's memory: torch's own allocator of it."""

from typing import Any

from apex.contrib.nccl_allocator import nccl_allocator as _allocator

__all__ = ["get_nccl_allocator"]


def get_nccl_allocator() -> Any:
    """An allocator over ``ncclMemAlloc``, for ``torch.cuda.MemPool``; see ``nccl_allocator``."""
    return _allocator.allocator("get_nccl_allocator", None, None)
