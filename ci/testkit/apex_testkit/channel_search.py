"""The published search for an order of channels, in plain NumPy: what ours is compared with."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np


def retained(matrix: np.ndarray) -> float:
    """What 2:4 pruning keeps, by sorting every four."""
    return float(np.sort(np.abs(matrix.astype(np.float64)).reshape(-1, 4))[:, 2:].sum())


def partitions(columns: list[int]) -> Iterator[list[int]]:
    """All ways to put columns into unordered groups of four."""
    if not columns:
        yield []
        return
    for rest in combinations(columns[1:], 3):
        group = (columns[0], *rest)
        left = [c for c in columns if c not in group]
        yield from ([*group, *others] for others in partitions(left))


_MOVES = np.array(list(partitions(list(range(8)))))
_FOURS, _PARTS = np.unique(_MOVES.reshape(-1, 4), axis=0, return_inverse=True)
_PARTS = _PARTS.reshape(-1, 2)


def values_of_windows(magnitudes: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """What each of the 35 orders of eight columns keeps.

    Args:
        magnitudes: float32 ``[columns, rows]``.
        windows: ``[N, 8]`` columns.
    """
    kept = np.empty((len(windows), len(_FOURS)), np.float32)
    for i, window in enumerate(windows):
        columns = magnitudes[window]  # small enough for the caches
        a, b, c, d = (columns[_FOURS[:, j]] for j in range(4))
        apart = np.maximum(a, b) + np.maximum(c, d)
        kept[i] = np.maximum(apart, np.maximum(a + b, c + d)).sum(1)
    return kept.astype(np.float64)[:, _PARTS].sum(2)


def published(matrix: np.ndarray, escapes: int = 100, seed: int = 0) -> tuple[float, np.ndarray]:
    """The published algorithm with windows of 8 columns.

    Pool & Yu 2021, sections 4.1 and 4.2: evaluate all pairs of stripes, make the best moves that
    have no stripe in common, evaluate what these changed, and repeat; where none gains, swap two
    random columns and go on.

    Returns:
        The most that was kept, and the order that keeps it.
    """
    random, order = np.random.default_rng(seed), np.arange(matrix.shape[1])
    magnitudes = np.ascontiguousarray(np.abs(matrix).T.astype(np.float32))
    stripes = order.reshape(-1, 4)
    pairs = np.array(list(combinations(range(len(stripes)), 2)))
    gains, chosen = np.zeros(len(pairs)), np.zeros(len(pairs), np.int64)

    def evaluate(changed: set[int]) -> None:
        which = np.flatnonzero(np.isin(pairs, list(changed)).any(1))
        values = values_of_windows(magnitudes, stripes[pairs[which]].reshape(-1, 8))
        gains[which], chosen[which] = values.max(1) - values[:, 0], values.argmax(1)

    def make_moves() -> set[int]:
        used: set[int] = set()
        for index in np.argsort(-gains, kind="stable"):
            pair = pairs[index].tolist()
            if gains[index] > 1e-4 and used.isdisjoint(pair):
                used.update(pair)
                stripes[pair] = stripes[pair].ravel()[_MOVES[chosen[index]]].reshape(2, 4)
        return used

    best, best_order = retained(matrix), order.copy()
    evaluate(set(range(len(stripes))))
    for left in range(escapes, -1, -1):
        while changed := make_moves():
            evaluate(changed)
        if (kept := retained(matrix[:, order])) > best:
            best, best_order = kept, order.copy()
        if left:
            swapped = random.choice(len(order), 2, replace=False)
            order[swapped] = order[swapped[::-1]]
            evaluate(set((swapped // 4).tolist()))
    return best, best_order
