"""Moves within some stripes (sets of four adjacent columns), and a greedy search that makes them.

A move permutes the columns of a window, which is some stripes. What counts is which four columns
each stripe has then. So the operator takes the retained magnitude of every set of four that occurs
in any move once, and the value of a move is a sum of these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..retained_magnitude import retained_magnitude

_FOURS_AT_ONCE = 1 << 18  # 8 MiB of channels' numbers
_VALUES_AT_ONCE = 1 << 22  # 32 MiB
# A gain below this part of what a window retains is rounding.
_LEAST_GAIN = 1e-9


def channel_magnitudes(name: str, matrix: Any) -> Tensor:
    """Absolute values of a matrix ``[rows, channels]``, as the operator takes them.

    Args:
        name: who asks, for errors.
        matrix: an array or a tensor of numbers, on any device; channels are a multiple of 4.

    Returns:
        ``[channels, rows]``, contiguous, float64 for float64 and else float32.

    Raises:
        ValueError: it has not two dimensions, or channels are no multiple of 4.
    """
    given = torch.as_tensor(matrix).detach()
    if given.dim() != 2 or given.shape[1] % 4 or given.shape[1] == 0:
        raise ValueError(
            f"{name}: matrix must be [rows, columns] with a multiple of 4 columns, got "
            f"{list(given.shape)}. Pad it with columns of zeros."
        )
    dtype = torch.float64 if given.dtype == torch.float64 else torch.float32
    return given.to(dtype).abs().t().contiguous()


@dataclass(frozen=True)
class Moves:
    """Permutations of the columns of a window, the first of which moves nothing.

    permutations: int64 ``[P, 4 * stripes]``. fours: int64 ``[F, 4]``, the sets of four columns that
    occur in them. parts: int64 ``[P, stripes]``, which of the sets each permutation has.
    """

    permutations: Tensor
    fours: Tensor
    parts: Tensor

    @staticmethod
    def of(permutations: np.ndarray) -> Moves:
        """Moves from ``[P, 4 * stripes]`` integers."""
        stripes = np.sort(permutations.reshape(len(permutations), -1, 4).astype(np.int64), axis=2)
        fours, parts = np.unique(stripes.reshape(-1, 4), axis=0, return_inverse=True)
        return Moves(
            torch.from_numpy(permutations.astype(np.int64)),
            torch.from_numpy(fours),
            torch.from_numpy(parts.reshape(stripes.shape[:2])),
        )

    def to(self, device: torch.device) -> Moves:
        """The same on a device."""
        return Moves(*(t.to(device) for t in (self.permutations, self.fours, self.parts)))

    def values(self, magnitudes: Tensor, windows: Tensor) -> Tensor:
        """What is retained of windows ``[G, 4 * stripes]`` of channels: float64 ``[G, P]``."""
        fours = windows[:, self.fours].reshape(-1, 4)
        kept = retained_magnitude(magnitudes, fours).double().view(len(windows), -1)
        # Windows are next to each other in memory, so that sums are of vectors.
        return F.embedding_bag(self.parts, kept.t().contiguous(), mode="sum").t()

    def best(self, magnitudes: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
        """The largest gain of each window, float64 ``[G]``, and the move that has it, ``[G]``."""
        at_once = min(_FOURS_AT_ONCE // len(self.fours), _VALUES_AT_ONCE // self.parts.numel())
        gains = windows.new_zeros(len(windows), dtype=torch.float64)
        chosen = windows.new_zeros(len(windows))
        for begin in range(0, len(windows), max(at_once, 1)):
            part = slice(begin, begin + max(at_once, 1))
            values = self.values(magnitudes, windows[part])
            most, index = values.max(1)
            gain = most - values[:, 0]
            is_real = gain > _LEAST_GAIN * most
            gains[part] = torch.where(is_real, gain, 0)
            chosen[part] = torch.where(is_real, index, 0)
        return gains, chosen


def swaps() -> Moves:
    """The 16 swaps of a column of one stripe with one of another, behind no move at all."""
    moves = [np.arange(8)]
    for left in range(4):
        for right in range(4, 8):
            moves.append(np.arange(8))
            moves[-1][[left, right]] = right, left
    return Moves.of(np.stack(moves))


class GreedySearch:
    """Makes the best moves of windows that have no stripe in common, until none gains anything.

    Args:
        magnitudes: of :func:`channel_magnitudes`.
        order: int64 ``[channels]``, the channels in the order that the search begins with.
        moves: what is tried in each window.
    """

    def __init__(self, magnitudes: Tensor, order: Tensor, moves: Moves) -> None:
        self.magnitudes, self.order = magnitudes, order.to(magnitudes.device).clone()
        self.moves = moves.to(magnitudes.device)
        stripes = len(order) // 4
        groups = list(combinations(range(stripes), moves.parts.shape[1]))
        self.groups = torch.tensor(groups, device=magnitudes.device).view(len(groups), -1)
        self.gains = torch.zeros(len(groups), dtype=torch.float64, device=magnitudes.device)
        self.chosen = torch.zeros(len(groups), dtype=torch.int64, device=magnitudes.device)
        self._evaluate(torch.arange(len(groups), device=magnitudes.device))

    def retained(self) -> float:
        """What 2:4 pruning keeps in the present order."""
        return float(retained_magnitude(self.magnitudes, self.order.view(-1, 4)).double().sum())

    def _evaluate(self, which: Tensor) -> None:
        windows = self.order.view(-1, 4)[self.groups[which]].flatten(1)
        self.gains[which], self.chosen[which] = self.moves.best(self.magnitudes, windows)

    def _make_moves(self) -> list[int]:
        """Make moves, the largest gain first; return the stripes that changed."""
        which = torch.nonzero(self.gains > 0).flatten()
        which = which[torch.argsort(self.gains[which], descending=True, stable=True)]
        groups, changed = self.groups[which].tolist(), set()
        stripes = self.order.view(-1, 4)
        for group, index in zip(groups, self.chosen[which].tolist(), strict=True):
            if changed.isdisjoint(group):
                changed.update(group)
                window = stripes[group].flatten()[self.moves.permutations[index]]
                stripes[group] = window.view(-1, 4)
        return sorted(changed)

    def after_change(self, stripes: list[int]) -> None:
        """Evaluate the windows that have any of these stripes."""
        is_changed = torch.zeros(len(self.order) // 4, dtype=torch.bool, device=self.order.device)
        is_changed[stripes] = True
        self._evaluate(torch.nonzero(is_changed[self.groups].any(1)).flatten())

    def converge(self) -> None:
        """Make moves until no window has one that gains."""
        while changed := self._make_moves():
            self.after_change(changed)

    def escape(self, attempts: int, seed: int) -> None:
        """Leave the local optimum ``attempts`` times; go back where that led to no better one.

        An attempt passes a column each round a ring of up to four stripes, which no move of two
        stripes undoes, and converges again.
        """
        stripes = len(self.order) // 4
        if stripes <= self.moves.parts.shape[1]:
            return  # one window, whose best is known
        random, most = np.random.default_rng(seed), self.retained()
        for _ in range(attempts):
            before = self.order.clone(), self.gains.clone(), self.chosen.clone()
            ring = random.permutation(stripes)[: min(4, stripes)]
            places = torch.from_numpy(4 * ring + random.integers(4, size=len(ring)))
            places = places.to(self.order.device)
            self.order[places] = self.order[places.roll(1)]
            self.after_change(ring.tolist())
            self.converge()
            retained = self.retained()
            if retained > most:
                most = retained
            else:
                self.order, self.gains, self.chosen = before
