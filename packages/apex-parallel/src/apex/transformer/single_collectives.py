"""Collectives on single tensors, under the names that torch gives them since 2.13."""

import torch.distributed as dist

__all__ = ["all_gather_single", "reduce_scatter_single"]

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``torch.distributed.all_gather_into_tensor`` by its newer name."""
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""``torch.distributed.reduce_scatter_tensor`` by its newer name."""
