"""LAMB whose state is divided among the ranks of a node."""

from .groups import get_process_group_ranks
from .optimizer import DistributedFusedLAMB

__all__ = ["DistributedFusedLAMB", "get_process_group_ranks"]
