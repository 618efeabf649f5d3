"""Rank 0's parameters for everybody, after a check that all ranks hold the same model."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn

from .checks import NAME, check_same_on_all_ranks, hashes_of_all_ranks, parameters_device
from .flat_tensors import flat_dist_call

CHUNK_BYTES = 256 << 20  # of a flat copy; one of a whole model would need its memory twice


def broadcast_parameters(module: nn.Module, owner: str = NAME) -> None:
    """Overwrite all parameters by rank 0's; buffers stay.

    Args:
        owner: whose errors these are.

    Raises:
        RuntimeError: the ranks' parameters differ in name, shape or dtype.
    """
    device = parameters_device(module, owner)
    hashes = hashes_of_all_ranks(module.named_parameters(), device)
    check_same_on_all_ranks(hashes, "the parameters", owner)
    broadcast_tensors(module.parameters(), 0)


def broadcast_tensors(tensors: Iterable[Tensor], source: int) -> None:
    """Overwrite tensors by those of rank ``source``, in flat copies of at most ``CHUNK_BYTES``.

    A larger tensor has a flat copy of its own.
    """
    chunk: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if chunk and size + tensor.nbytes > CHUNK_BYTES:
            flat_dist_call(chunk, dist.broadcast, (source,))
            chunk, size = [], 0
        if tensor.numel():
            chunk.append(tensor.detach())
            size += tensor.nbytes
    flat_dist_call(chunk, dist.broadcast, (source,))
