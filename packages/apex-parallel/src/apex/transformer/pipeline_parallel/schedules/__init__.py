"""The schedules of a pipeline, and the choice of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import utils
from .fwd_bwd_no_pipelining import forward_backward_no_pipelining
from .fwd_bwd_pipelining_with_interleaving import _forward_backward_pipelining_with_interleaving
from .fwd_bwd_pipelining_without_interleaving import (
    forward_backward_pipelining_without_interleaving,
)

__all__ = ["get_forward_backward_func"]


class ExperimentalWarning(Warning):
    """Warns of what is there to be tried."""


def get_forward_backward_func(
    virtual_pipeline_model_parallel_size: int | None, pipeline_model_parallel_size: int
) -> Callable[..., list[Any]]:
    """The schedule for a number of chunks per rank, or None, and a number of stages.

    Raises:
        RuntimeError: the pipeline is interleaved, and the number of micro-batches is no multiple
            of the number of stages.
    """
    if pipeline_model_parallel_size == 1:
        return forward_backward_no_pipelining
    if virtual_pipeline_model_parallel_size is None:
        return forward_backward_pipelining_without_interleaving
    if utils.get_num_microbatches() % pipeline_model_parallel_size:
        raise RuntimeError(
            "an interleaved pipeline needs a number of micro-batches that is a multiple of the "
            f"{pipeline_model_parallel_size} stages, got {utils.get_num_microbatches()}"
        )
    return _forward_backward_pipelining_with_interleaving
