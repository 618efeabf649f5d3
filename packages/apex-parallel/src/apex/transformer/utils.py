"""Checked division, and flat tensors cut over the tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from .._lost_ranks import explained
from . import parallel_state
from .single_collectives import all_gather_single

__all__ = [
    "divide",
    "ensure_divisibility",
    "gather_split_1d_tensor",
    "split_tensor_into_1d_equal_chunks",
]


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise ``ValueError`` unless ``numerator`` is a multiple of ``denominator``."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(
    numerator: int,
    denominator: int,
    *,
    what: str | None = None,
    by: str = "",
    remedy: str | None = None,
) -> int:
    """``numerator / denominator``, an exact integer; ``ValueError`` if there is none.

    Args:
        what: for the error: the function or layer, and its argument.
        by: what ``denominator`` is a number of.
        remedy: what to do; by default to take the next multiple.
    """
    if what is None:
        ensure_divisibility(numerator, denominator)
    elif numerator % denominator:
        multiple = numerator + -numerator % denominator
        remedy = remedy or f"Make it a multiple of {denominator}, such as {multiple}."
        raise ValueError(f"{what}: {numerator} is not divisible by {denominator} {by}. {remedy}")
    return numerator // denominator


def tensor_rank_share(what: str, size: int) -> int:
    """The share of ``size`` that each tensor-parallel rank has; ``ValueError`` if there is none.

    Args:
        what: for the error: the function or layer, and its argument.
    """
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    remedy = (
        f"Make it a multiple of {ranks}, such as {size + -size % ranks}, or give another "
        "tensor_model_parallel_size_ to initialize_model_parallel."
    )
    return divide(size, ranks, what=what, by="tensor-parallel ranks", remedy=remedy)


def split_tensor_into_1d_equal_chunks(tensor: Tensor) -> Tensor:
    """This tensor-parallel rank's part of the flattened ``tensor``.

    Returns a view of ``tensor`` if it is contiguous, a copy otherwise. Raises ``ValueError`` if
    the number of elements is not divisible by the number of tensor-parallel ranks.
    """
    size = tensor_rank_share(
        "split_tensor_into_1d_equal_chunks: number of elements of tensor", tensor.numel()
    )
    start = parallel_state.get_tensor_model_parallel_rank() * size
    return tensor.reshape(-1)[start : start + size]


def gather_split_1d_tensor(tensor: Tensor) -> Tensor:
    """The inverse of :func:`split_tensor_into_1d_equal_chunks`: all ranks' parts, one flat tensor.

    ``tensor`` has the same number of elements on all tensor-parallel ranks.
    """
    world = parallel_state.get_tensor_model_parallel_world_size()
    gathered = torch.empty(world * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    group = parallel_state.get_tensor_model_parallel_group()
    with explained("gather_split_1d_tensor", group):
        all_gather_single(gathered, tensor.reshape(-1), group=group)
    return gathered
