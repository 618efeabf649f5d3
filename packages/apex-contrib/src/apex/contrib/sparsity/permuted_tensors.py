"""Permutes dimensions of tensors in place, with their gradients and the optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .channel_rules import ChannelRules
from .channel_spaces import Use
from .ordered_norm import OrderedLocalResponseNorm


def replicate_sequence(sequence: Sequence[int], replications: int) -> list[int]:
    """A permutation that permutes each of ``replications`` runs of channels like the first."""
    length = len(sequence)
    return [run * length + i for run in range(replications) for i in sequence]


@torch.no_grad()
def permute_spaces(
    rules: ChannelRules,
    permutations: Mapping[int, Sequence[int]],
    optimizer: torch.optim.Optimizer | None,
) -> list[Use]:
    """Permute all tensors that have the channels of some spaces; return what was permuted."""
    given = {space: list(permutation) for space, permutation in permutations.items()}
    orders = [(use, rules.spaces.new_order(use, given)) for use in rules.spaces.uses()]
    moved = [(use, order) for use, order in orders if order is not None]
    for use, order in moved:
        _permute(use.tensor, use.dim, order, optimizer)
    done = {id(use.tensor) for use, _ in moved}
    for norm, order in rules.local_norms.items():
        if id(order) in done:
            OrderedLocalResponseNorm.adopt(norm, order)
    return [use for use, _ in moved]


@torch.no_grad()
def permute_dims(
    dims: Sequence[tuple[Tensor, int]],
    sequence: Sequence[int],
    dryrun: bool,
    optimizer: torch.optim.Optimizer | None,
) -> bool:
    """Permute a dimension of each of some tensors, of which each run is permuted like the first.

    Returns:
        False where there are no tensors, ``sequence`` is no permutation, or a dimension is not a
        multiple of its length: nothing is permuted then. Nothing is with ``dryrun`` either.
    """
    length = len(sequence)
    is_permutation = length > 0 and sorted(sequence) == list(range(length))
    if not dims or not is_permutation or any(t.shape[d] % length for t, d in dims):
        return False
    for tensor, dim in () if dryrun else dims:
        order = replicate_sequence(sequence, tensor.shape[dim] // length)
        _permute(tensor, dim, torch.tensor(order), optimizer)
    return True


def _permute(
    tensor: Tensor, dim: int, order: Tensor, optimizer: torch.optim.Optimizer | None
) -> None:
    for one in (tensor, *_companions(tensor, optimizer)):
        one.copy_(one.index_select(dim, order.to(one.device)))


def _companions(tensor: Tensor, optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """The gradient, and what the optimizer keeps of each element."""
    tensors = [tensor.grad] if tensor.grad is not None else []
    if optimizer is not None and tensor in optimizer.state:
        kept = optimizer.state[tensor].values()
        tensors += [t for t in kept if isinstance(t, Tensor) and t.shape == tensor.shape]
    return tensors
