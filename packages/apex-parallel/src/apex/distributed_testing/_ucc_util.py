"""Whether the backend UCC is there."""

import importlib.util

import torch.distributed as dist

__all__ = ["HAS_UCC"]

HAS_UCC: bool = dist.is_available() and (
    dist.is_ucc_available() or importlib.util.find_spec("torch_ucc") is not None
)
"""Whether torch has the UCC backend."""
