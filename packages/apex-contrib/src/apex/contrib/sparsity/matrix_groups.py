"""The weights that are searched for an order of channels: those below each other that read them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .channel_graph import ChannelGraph
from .channel_spaces import key_of

_LEAST_GAIN = 1e-3  # of what is retained: less is not worth a search


def retained(matrix: Tensor) -> float:
    """What 2:4 pruning keeps of magnitudes."""
    fours = matrix.reshape(-1, 4)
    return float(fours.topk(2, dim=1, sorted=False).values.sum(dtype=torch.float64))


def matrix_groups(
    graph: ChannelGraph, sparse: Mapping[Any, Tensor], skip: Callable[[int, str], None]
) -> dict[int, Tensor]:
    """For each space whose permutation can win something, the pruned weights that read it.

    Args:
        sparse: the weights that will be pruned, by :func:`key_of`.
        skip: is called with a space that is left out, and the reason.

    Returns:
        By the number of the space, magnitudes ``[rows, atom]``: all weights below each other, and
        runs of channels that are permuted alike, too.
    """
    spaces, readers = graph.rules.spaces, dict[int, list[Tensor]]()
    left_out: dict[int, str] = {}
    for use in spaces.uses():
        if use.dim != 1 or key_of(use.tensor) not in sparse:
            continue
        rows, begin = _rows(use.tensor), 0
        for space, length in use.parts:
            root, atom = spaces.root(space), spaces[space].atom
            if begin % 4:  # its columns are pruned together with others'
                left_out[root] = f"{use.name} reads them from channel {begin} on"
            part = rows[:, begin : begin + length].reshape(-1, atom)
            readers.setdefault(root, []).append(part.float().abs())
            begin += length
    groups = {}
    for root in spaces.roots():
        space = spaces[root]
        reason = space.frozen or left_out.get(root)
        if reason is None and root not in readers:
            reason = "Dense"
        elif reason is None and (space.atom % 4 or space.atom < 8):
            reason = f"Useless C: {space.atom}"
        elif reason is None and _possible_gain(torch.cat(readers[root])) < _LEAST_GAIN:
            reason = "Not needed"
        if reason is None:
            groups[root] = torch.cat(readers[root])
        else:
            skip(root, reason)
    return groups


def weights_of(
    graph: ChannelGraph, names: Iterable[str], sparse: Collection[Any], columns: int
) -> Tensor | None:
    """Magnitudes ``[rows, columns]`` of the pruned weights of some nodes; None if there are none.

    Weights with more columns are cut into runs, which are below each other.
    """
    uses = {key_of(u.tensor): u for name in names for u in graph.uses_of(name, 1)}
    found = [_rows(use.tensor) for key, use in uses.items() if key in sparse]
    if not found:
        return None
    return torch.cat([rows.reshape(-1, columns) for rows in found]).float().abs()


def _rows(weight: Tensor) -> Tensor:
    return weight.detach().movedim(1, -1).reshape(-1, weight.shape[1])


def _possible_gain(matrix: Tensor) -> float:
    """How much more than 2:4 pruning of each row would keep if its large values lay anywhere."""
    kept, half = retained(matrix), matrix.shape[1] // 2
    most = float(matrix.topk(half, dim=1, sorted=False).values.sum(dtype=torch.float64))
    return most / kept - 1 if kept else 0.0
