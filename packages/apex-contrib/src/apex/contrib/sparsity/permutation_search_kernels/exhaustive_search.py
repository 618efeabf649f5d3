"""All permutations of windows of columns: the search that loses the least.

Pool & Yu 2021, *Channel Permutations for N:M Sparsity*, sections 4.1 and 4.2: permutations that
differ in the order of stripes, or of columns in a stripe, are the same; a greedy search makes the
best moves of windows, and escapes from local optima at random.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import torch

from .windows import GreedySearch, Moves, channel_magnitudes

_WIDEST = 12  # columns of a window: 16 would have 2.6 million permutations
_HALVED_ABOVE = 512  # columns, at the widest window


def is_canonical(perm: Sequence[int], col: int) -> bool:
    """Whether ``col`` may follow ``perm``, so that of equal permutations one alone is listed.

    Columns of a stripe ascend, and so do the first columns of stripes.
    """
    if not perm:
        return col == 0
    return col > perm[-1] if len(perm) % 4 else col > perm[-4]


def generate_unique_combinations(
    built_permutation: list[int],
    remaining_columns: list[int],
    full_permutation_list: list[list[int]],
    group_width: int,
) -> None:
    """Append every way to go on from ``built_permutation`` to ``full_permutation_list``.

    The next group begins with the smallest column that remains, so that groups are in order.
    """
    if not remaining_columns:
        full_permutation_list.append(built_permutation)
        return
    first, *others = remaining_columns
    for rest in combinations(others, group_width - 1):
        left = [column for column in others if column not in rest]
        built = [*built_permutation, first, *rest]
        generate_unique_combinations(built, left, full_permutation_list, group_width)


@cache
def _unique_combinations(columns: int, group_width: int) -> np.ndarray:
    found: list[list[int]] = []
    generate_unique_combinations([], list(range(columns)), found, group_width)
    return np.array(found, dtype=np.uint32).reshape(len(found), columns)


def generate_all_unique_combinations(
    C: int, M: int, must_use_all_groups: bool = False
) -> np.ndarray:
    """List the permutations of ``C`` columns that put different columns into groups of ``M``.

    Args:
        C: columns, a multiple of ``M``; each number takes memory for ``C!/(M!^G G!)`` rows.
        M: columns of a group.
        must_use_all_groups: leave out those that keep any group together, but keep the first.

    Returns:
        uint32 ``[N, C]``; the first is the identity. They are kept in memory. Apex keeps them on
        disk too, because it takes minutes to make them; here that takes milliseconds.

    Raises:
        ValueError: ``C`` is no multiple of ``M``.
    """
    if M < 1 or C < 1 or C % M:
        raise ValueError(f"C must be a positive multiple of M, got C={C} and M={M}.")
    found = _unique_combinations(C, M)
    if must_use_all_groups:
        groups = found.reshape(len(found), -1, M)
        keeps = (groups[:, :, 0] % M == 0) & (groups[:, :, -1] - groups[:, :, 0] == M - 1)
        keeps[0] = False
        found = found[~keeps.any(1)]
    return found.copy()


def predict_unique_combinations(C: int, M: int) -> int:
    """How many of them there are: ``C! / (M!^G G!)`` with ``G = C / M``."""
    groups = C // M
    return math.factorial(C) // (math.factorial(M) ** groups * math.factorial(groups))


@cache
def _all_moves(stripes: int) -> Moves:
    return Moves.of(_unique_combinations(4 * stripes, 4))


def generate_stripe_groups(num_stripes: int, window_size: int) -> list[tuple[int, ...]]:
    """All sets of ``window_size`` of ``num_stripes`` stripes."""
    return list(combinations(range(num_stripes), window_size))


def collect_stripes(matrix: np.ndarray, stripes: Sequence[int], group_width: int) -> np.ndarray:
    """The columns of some stripes, side by side."""
    columns = np.asarray(stripes)[:, None] * group_width + np.arange(group_width)
    return matrix[:, columns.ravel()]


def apply_stripe_group_permutation(
    sgp: Sequence[int], stripes: Sequence[int], group_width: int, permutation: Sequence[int]
) -> list[int]:
    """Apply ``sgp``, a permutation of the columns of ``stripes``, to a permutation of all."""
    result = np.array(permutation)
    columns = (np.asarray(stripes)[:, None] * group_width + np.arange(group_width)).ravel()
    result[columns] = result[columns[np.asarray(sgp)]]
    return result.tolist()


def build_stripe_map(
    matrix: np.ndarray,
    group_width: int,
    window_size: int,
    stripe_map: np.ndarray | None = None,
    stripe_ids: np.ndarray | None = None,
    perm_map: np.ndarray | None = None,
    used_stripes: Sequence[int] = (),
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the best permutation of every window of ``window_size`` stripes.

    Args:
        matrix: ``[rows, columns]``, in the present order.
        group_width: 4, the columns of a stripe.
        stripe_map, stripe_ids, perm_map: what an earlier call returned; then only windows with a
            stripe of ``used_stripes`` are evaluated again.

    Returns:
        Gains ``[G]``, stripes ``[G, window_size]``, permutations ``[G, columns of a window]``.
    """
    _check_group_width(group_width)
    magnitudes = channel_magnitudes("build_stripe_map", matrix)
    moves = _all_moves(window_size).to(magnitudes.device)
    if stripe_map is None or stripe_ids is None or perm_map is None:
        groups = generate_stripe_groups(matrix.shape[1] // 4, window_size)
        stripe_ids = np.array(groups, dtype=np.int64).reshape(len(groups), window_size)
        stripe_map = np.zeros(len(groups))
        perm_map = np.tile(np.arange(4 * window_size), (len(groups), 1))
        which = np.arange(len(groups))
    else:
        which = np.flatnonzero(np.isin(stripe_ids, list(used_stripes)).any(1))
    columns = torch.from_numpy(stripe_ids[which, :, None] * 4 + np.arange(4)).flatten(1)
    gains, chosen = moves.best(magnitudes, columns.to(magnitudes.device))
    stripe_map, perm_map = stripe_map.copy(), perm_map.copy()
    stripe_map[which] = gains.cpu().numpy()
    perm_map[which] = moves.permutations[chosen].cpu().numpy()
    return stripe_map, stripe_ids, perm_map


def use_stripe_map(
    matrix: np.ndarray,
    group_width: int,
    stripe_map: np.ndarray,
    stripe_ids: np.ndarray,
    perm_map: np.ndarray,
    permutation: Sequence[int],
) -> tuple[np.ndarray, list[int], float, list[int]]:
    """Apply the best permutations of windows that have no stripe in common.

    Returns:
        The matrix in its new order, the stripes that changed, the gain, and the permutation.
    """
    _check_group_width(group_width)
    order = list(range(matrix.shape[1]))
    used: set[int] = set()
    gain = 0.0
    for which in np.argsort(-stripe_map, kind="stable"):
        group = stripe_ids[which].tolist()
        if stripe_map[which] <= 0:
            break
        if used.isdisjoint(group):
            used.update(group)
            gain += float(stripe_map[which])
            order = apply_stripe_group_permutation(perm_map[which], group, group_width, order)
    return matrix[:, order], sorted(used), gain, [permutation[i] for i in order]


def search_matrix(matrix: Any, group_width: int) -> tuple[Any, float, list[int]]:
    """Try all permutations of a whole matrix of at most 12 columns.

    Returns:
        The matrix in the best order, seconds, and the permutation.
    """
    _check_group_width(group_width)
    if matrix.shape[1] > _WIDEST:
        raise ValueError(
            f"search_matrix: matrix has {matrix.shape[1]} columns, expected at most {_WIDEST}: "
            f"{predict_unique_combinations(matrix.shape[1], 4)} permutations are too many. Use "
            "Exhaustive_Search with stripe_group_size=8."
        )
    return Exhaustive_Search(matrix, matrix.shape[1])


def Exhaustive_Search(
    matrix: Any,
    stripe_group_size: int = -1,
    escape_attempts: int = 0,
    permutation: Sequence[int] | None = None,
    seed: int = 1,
) -> tuple[Any, float, list[int]]:
    """Search for an order of columns of which 2:4 pruning keeps much.

    Args:
        matrix: array or tensor ``[rows, columns]``, columns a multiple of 4.
        stripe_group_size: columns of a window, 4, 8 or 12; -1: all columns where there are at most
            12, else 8. Above 512 columns, 12 searches each half with windows of 12 columns, and
            then everything with 8.
        escape_attempts: how often to leave a local optimum.
        permutation: the order to begin with; default: as they are.
        seed: of what is random. Equal seeds give equal permutations, at any number of threads.

    Returns:
        The matrix in the order that was found, seconds, and that order: column ``i`` of the result
        is column ``permutation[i]`` of ``matrix``.

    Raises:
        ValueError: columns are no multiple of 4, a window has another size, or ``permutation`` is
            none.
    """
    begun_s = time.perf_counter()
    magnitudes = channel_magnitudes("Exhaustive_Search", matrix)
    columns = magnitudes.shape[0]
    if stripe_group_size == -1:
        stripe_group_size = columns if columns <= _WIDEST else 8
    if stripe_group_size not in (4, 8, _WIDEST):
        raise ValueError(
            f"Exhaustive_Search: stripe_group_size must be 4, 8, 12 or -1, got {stripe_group_size}."
        )
    order = torch.arange(columns) if permutation is None else torch.tensor(list(permutation))
    if not torch.equal(order.sort().values, torch.arange(columns)):
        raise ValueError(f"Exhaustive_Search: permutation must have each of 0 to {columns - 1}.")
    width = min(stripe_group_size, columns)
    if width == _WIDEST and columns > _HALVED_ABOVE:
        middle = columns // 8 * 4
        halves = order.split([middle, columns - middle])
        found = [_searched(magnitudes, half, 12, escape_attempts, seed) for half in halves]
        order, width = torch.cat(found), 8
    order = _searched(magnitudes, order, width, escape_attempts, seed).tolist()
    return matrix[:, order], time.perf_counter() - begun_s, order


def _searched(
    magnitudes: torch.Tensor, order: torch.Tensor, width: int, attempts: int, seed: int
) -> torch.Tensor:
    search = GreedySearch(magnitudes, order, _all_moves(width // 4))
    search.converge()
    search.escape(attempts, seed)
    return search.order.cpu()


def _check_group_width(group_width: int) -> None:
    if group_width != 4:
        raise ValueError(f"group_width must be 4, the columns of a stripe, got {group_width}.")
