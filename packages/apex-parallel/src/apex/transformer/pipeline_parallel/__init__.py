"""Pipeline parallelism: stages of a model on different ranks, micro-batches one after the other."""

from .schedules import get_forward_backward_func
from .schedules.common import build_model

__all__ = ["build_model", "get_forward_backward_func"]
