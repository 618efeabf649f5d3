"""Printing on one rank alone."""

from __future__ import annotations

import torch.distributed as dist


def print_rank_0(message: str) -> None:
    """Print on rank 0, and wherever ``torch.distributed`` is not initialised."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


def is_last_rank() -> bool:
    """Whether this is the last rank of the world."""
    return dist.get_rank() == dist.get_world_size() - 1


def print_rank_last(message: str) -> None:
    """Print on the last rank, and wherever ``torch.distributed`` is not initialised."""
    if not dist.is_initialized() or is_last_rank():
        print(message, flush=True)
