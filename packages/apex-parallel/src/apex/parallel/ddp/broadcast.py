"""Rank 0's parameters for everybody, after a check that all ranks hold the same model."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from .checks import NAME, check_same_on_all_ranks, hashes_of_all_ranks, parameters_device
from .flat_tensors import flat_dist_call


def broadcast_parameters(module: nn.Module, owner: str = NAME) -> None:
    """Overwrite all parameters by rank 0's, in one flat broadcast per dtype; buffers stay.

    Args:
        owner: whose errors these are.

    Raises:
        RuntimeError: the ranks' parameters differ in name, shape or dtype.
    """
    device = parameters_device(module, owner)
    hashes = hashes_of_all_ranks(module.named_parameters(), device)
    check_same_on_all_ranks(hashes, "the parameters", owner)
    params = [param.detach() for param in module.parameters()]
    flat_dist_call(params, dist.broadcast, (0,))
