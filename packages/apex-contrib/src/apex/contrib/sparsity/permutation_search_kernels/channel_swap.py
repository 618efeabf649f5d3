"""Swaps of two columns: for matrices so wide that windows of stripes are too many."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch

from .permutation_utilities import try_swap
from .windows import GreedySearch, channel_magnitudes, swaps

__all__ = [
    "Channel_Swap",
    "build_stripe_pairs",
    "build_swap_map",
    "columns_to_stripes_and_swap_idx",
    "compute_swap_map",
    "progressive_channel_swap",
    "stripes_and_swap_idx_to_columns",
    "try_swap",
    "use_swap_map",
]


def stripes_and_swap_idx_to_columns(stripe0: int, stripe1: int, idx: int) -> tuple[int, int]:
    """The columns that swap ``idx``, 0 to 15, of two stripes exchanges."""
    return 4 * stripe0 + idx // 4, 4 * stripe1 + idx % 4


def columns_to_stripes_and_swap_idx(col0: int, col1: int) -> tuple[int, int, int]:
    """The stripes of two columns, and the index of their swap."""
    return col0 // 4, col1 // 4, 4 * (col0 % 4) + col1 % 4


def build_stripe_pairs(matrix: Any, used_stripes: Sequence[int]) -> np.ndarray:
    """Pairs of stripes ``[N, 2]``, one of ``used_stripes`` in each; all where that is empty."""
    pairs = np.array(list(combinations(range(matrix.shape[1] // 4), 2)), dtype=np.uint32)
    pairs = pairs.reshape(-1, 2)
    return pairs[np.isin(pairs, list(used_stripes)).any(1)] if len(used_stripes) else pairs


def compute_swap_map(matrix: Any, used_stripes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Gains of all 16 swaps of pairs of stripes, float64 ``[N, 16]``, and the pairs ``[N, 2]``."""
    pairs = build_stripe_pairs(matrix, used_stripes)
    return _gains(matrix, pairs), pairs


def _gains(matrix: Any, pairs: np.ndarray) -> np.ndarray:
    magnitudes = channel_magnitudes("compute_swap_map", matrix)
    windows = torch.from_numpy(pairs.astype(np.int64)[:, :, None] * 4 + np.arange(4)).flatten(1)
    moves = swaps().to(magnitudes.device)
    values = moves.values(magnitudes, windows.to(magnitudes.device)).cpu().numpy()
    return values[:, 1:] - values[:, :1]


def build_swap_map(
    matrix: Any,
    swap_map: np.ndarray | None = None,
    swap_ids: np.ndarray | None = None,
    used_stripes: Sequence[int] = (),
    verbosity: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Find what each swap of columns of two stripes gains.

    Args:
        matrix: ``[rows, columns]``, in the present order.
        swap_map, swap_ids: what an earlier call returned; then only pairs with a stripe of
            ``used_stripes`` are evaluated again.
        verbosity: above 0, say how many.

    Returns:
        Gains, float64 ``[N, 16]``, and pairs of stripes ``[N, 2]``; see :func:`compute_swap_map`.
    """
    if swap_map is None or swap_ids is None:
        swap_map, swap_ids = compute_swap_map(matrix, ())
        count = len(swap_ids)
    else:
        which = np.flatnonzero(np.isin(swap_ids, list(used_stripes)).any(1))
        swap_map, count = swap_map.copy(), len(which)
        swap_map[which] = _gains(matrix, swap_ids[which])
    if verbosity > 0:
        print(f"build_swap_map: {count} pairs of stripes")
    return swap_map, swap_ids


def use_swap_map(
    matrix: np.ndarray,
    swap_map: np.ndarray,
    swap_ids: np.ndarray,
    threshold: float,
    used_escape_attempts: int,
    escape_attempts: int,
    permutation: Sequence[int],
    verbosity: int = 0,
) -> tuple[np.ndarray, list[int], float, list[int], int]:
    """Make the best swaps of pairs that have no stripe in common; where none gains, escape.

    Args:
        swap_map, swap_ids: of :func:`build_swap_map`.
        threshold: what a swap must gain, in units of the matrix.
        used_escape_attempts, escape_attempts: how many escapes were made, and how many may be: each
            swaps two columns of different stripes at random, the same for the same number.
        permutation: the order of the columns so far.
        verbosity: above 0, say what was done.

    Returns:
        The matrix in its new order, the stripes that changed, the gain (negative for most escapes),
        the permutation, and how many escapes were made.
    """
    order, used, gain = list(range(matrix.shape[1])), set[int](), 0.0
    best = swap_map.argmax(1)
    gains = swap_map[np.arange(len(best)), best]
    for which in np.argsort(-gains, kind="stable"):
        pair = swap_ids[which].tolist()
        if gains[which] <= threshold:
            break
        if used.isdisjoint(pair):
            used.update(pair)
            gain += float(gains[which])
            a, b = stripes_and_swap_idx_to_columns(*pair, int(best[which]))
            order[a], order[b] = order[b], order[a]
    if not used and used_escape_attempts < escape_attempts and len(swap_ids):
        random = np.random.default_rng(used_escape_attempts)
        which, swap = random.integers(len(swap_ids)), int(random.integers(16))
        pair, used_escape_attempts = swap_ids[which].tolist(), used_escape_attempts + 1
        used.update(pair)
        gain = float(swap_map[which, swap])
        a, b = stripes_and_swap_idx_to_columns(*pair, swap)
        order[a], order[b] = order[b], order[a]
    if verbosity > 0:
        print(f"use_swap_map: {len(used)} stripes changed, {gain:.6g} more retained")
    moved = [permutation[i] for i in order]
    return matrix[:, order], sorted(used), gain, moved, used_escape_attempts


def Channel_Swap(
    matrix: Any,
    escape_attempts: int = 0,
    verbosity: int = 0,
    permutation: Sequence[int] | None = None,
    seed: int = 1,
) -> tuple[Any, float, list[int]]:
    """Swap columns, the largest gain first, until no swap keeps more.

    Arguments and result are those of :func:`.exhaustive_search.Exhaustive_Search`; ``verbosity``
    above 0 prints what is retained.
    """
    begun_s = time.perf_counter()
    magnitudes = channel_magnitudes("Channel_Swap", matrix)
    start = range(magnitudes.shape[0]) if permutation is None else permutation
    search = GreedySearch(magnitudes, torch.tensor(list(start)), swaps())
    search.converge()
    search.escape(escape_attempts, seed)
    if verbosity > 0:
        print(f"Channel_Swap: {search.retained():.6g} of {float(magnitudes.sum()):.6g} retained")
    order = search.order.tolist()
    return matrix[:, order], time.perf_counter() - begun_s, order


def progressive_channel_swap(
    matrix: Any, time_limit_s: float = 60, improvement_threshold: float = 1e-9, seed: int = 1
) -> list[int]:
    """Swap columns of random pairs of stripes while that raises what is retained.

    In a round every stripe meets one other, and each pair makes its best swap; after as many
    rounds as there are stripes, each has met all others. It ends where none of these rounds gained
    anything, or at the time limit. Memory grows with columns, not with pairs of stripes.

    Args:
        time_limit_s: seconds. Equal seeds give equal permutations unless it ends the search.
        improvement_threshold: what a swap must gain, in units of the matrix.
    """
    end_s = time.perf_counter() + time_limit_s
    magnitudes = channel_magnitudes("progressive_channel_swap", matrix)
    moves = swaps().to(magnitudes.device)
    stripes = torch.arange(magnitudes.shape[0], device=magnitudes.device).view(-1, 4)
    random, players = np.random.default_rng(seed), len(stripes) + len(stripes) % 2
    gained = len(stripes) > 1
    while gained and time.perf_counter() < end_s:
        gained, ring = False, random.permutation(players)
        for _ in range(players - 1):
            pairs = np.stack([ring[: players // 2], ring[: players // 2 - 1 : -1]], axis=1)
            pairs = torch.from_numpy(pairs[(pairs < len(stripes)).all(1)]).to(stripes.device)
            gains, chosen = moves.best(magnitudes, stripes[pairs].flatten(1))
            chosen = torch.where(gains > improvement_threshold, chosen, 0)
            windows = stripes[pairs].flatten(1).gather(1, moves.permutations[chosen])
            stripes[pairs.flatten()] = windows.view(-1, 4)
            gained = gained or bool((chosen > 0).any())
            ring[1:] = np.roll(ring[1:], 1)
            if time.perf_counter() >= end_s:
                break
    return stripes.flatten().tolist()
