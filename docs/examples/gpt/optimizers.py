"""Three optimizers with the same mathematics, and checkpoints that go from each to each."""

from typing import Any

import torch
from torch import nn

from apex.optimizers import FusedAdam
from apex.transformer import parallel_state

CLASSES = ("FusedAdam", "DistributedFusedAdam", "AdamW")
HYPER = {"betas": (0.9, 0.95), "weight_decay": 0.1}


def make_optimizer(
    name: str, groups: Any, model: nn.Module, sequence_parallel: bool
) -> torch.optim.Optimizer:
    """An optimizer of ``groups``, which are the model's parameters."""
    if name == "AdamW":
        return torch.optim.AdamW(groups, fused=True, **HYPER)
    if name == "FusedAdam":
        return FusedAdam(groups, **HYPER)
    from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam

    # Sequence parallelism completes gradients after the backward pass. A pipeline has several
    # passes, whose gradients are to be added up over replicas once.
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    waits = sequence_parallel or stages > 1
    optimizer = DistributedFusedAdam(
        groups,
        process_group=parallel_state.get_data_parallel_group(),
        overlap_grad_sync=not waits,
        **HYPER,
    )
    model.no_sync = optimizer.no_sync  # which schedules use for all micro-batches but the last
    return optimizer


def is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether gradients are in the optimizer, and each replica has a share of the state."""
    return type(optimizer).__name__ == "DistributedFusedAdam"


def load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take the state of any of the three; all replicas call it."""
    if "format" in state and not is_sharded(optimizer):
        from apex.contrib.optimizers.distributed_fused_adam import for_torch

        state = for_torch(state)
    optimizer.load_state_dict(state)
