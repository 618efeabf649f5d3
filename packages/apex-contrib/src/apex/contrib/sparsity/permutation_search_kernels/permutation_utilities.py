"""What 2:4 pruning keeps of a matrix, and comparisons of permutations: plain NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def use_gpu(initial_override: bool = True) -> bool:
    """Whether searches may run on a GPU: one is there, and ``initial_override`` allows it."""
    import torch

    return initial_override and torch.cuda.is_available()


def apply_2_to_4(matrix: np.ndarray) -> np.ndarray:
    """A copy of ``[rows, columns]`` with the two smallest of every four columns 0."""
    fours = matrix.reshape(len(matrix), -1, 4)
    smallest = np.argsort(np.abs(fours), axis=2, kind="stable")[..., :2]
    pruned = fours.copy()
    np.put_along_axis(pruned, smallest, 0, axis=2)
    return pruned.reshape(matrix.shape)


def sum_after_2_to_4(matrix: np.ndarray) -> float:
    """The sum of magnitudes that 2:4 pruning keeps, in float64."""
    fours = np.abs(np.asarray(matrix, dtype=np.float64)).reshape(len(matrix), -1, 4)
    return float(np.partition(fours, 2, axis=2)[..., 2:].sum())


def unstructured_prune(matrix: np.ndarray, sparsity: float) -> np.ndarray:
    """A copy with the smallest magnitudes 0: the share ``sparsity``, anywhere in the matrix."""
    pruned = matrix.copy()
    smallest = np.argsort(np.abs(matrix), axis=None, kind="stable")
    pruned.flat[smallest[: int(matrix.size * sparsity)]] = 0
    return pruned


def try_swap(matrix: np.ndarray, dst: int, src: int) -> float:
    """What 2:4 pruning keeps more if columns ``dst`` and ``src`` swap; below 0: what it loses."""
    stripes = sorted({dst // 4, src // 4})
    columns = [4 * stripe + i for stripe in stripes for i in range(4)]
    swapped = [{dst: src, src: dst}.get(column, column) for column in columns]
    return sum_after_2_to_4(matrix[:, swapped]) - sum_after_2_to_4(matrix[:, columns])


def efficacy(
    optimal_lost_magnitude: float, base_lost_magnitude: float, cur_lost_magnitude: float
) -> float:
    """The share of what could be won over ``base`` that is won: 0 as base, 1 as the optimum."""
    possible = base_lost_magnitude - optimal_lost_magnitude
    return (base_lost_magnitude - cur_lost_magnitude) / possible if possible else 1.0


def magnitude_after_pruning_rows(matrix: np.ndarray, rate: float = 0.5) -> float:
    """The sum of magnitudes if each row loses its smallest, the share ``rate``, in float64.

    At 0.5 no order of columns makes 2:4 pruning keep more.
    """
    lost = int(matrix.shape[1] * rate)
    return float(np.sort(np.abs(np.asarray(matrix, dtype=np.float64)), axis=1)[:, lost:].sum())


def try_permutations_on_matrix(
    matrix: np.ndarray, permutations: Sequence[Sequence[int]]
) -> tuple[float, list[int]]:
    """The best of some permutations: what it keeps more than the given order, and itself."""
    kept = [sum_after_2_to_4(matrix[:, list(permutation)]) for permutation in permutations]
    best = int(np.argmax(kept))
    return kept[best] - sum_after_2_to_4(matrix), list(permutations[best])


def find_permutation(A: np.ndarray, B: np.ndarray) -> list[int]:
    """Say for each column of ``B`` which column of ``A`` it is; equal columns in their order.

    Raises:
        ValueError: a column of ``B`` is no column of ``A``, or is there more often.
    """
    left: dict[bytes, list[int]] = {}
    for column in range(A.shape[1] - 1, -1, -1):
        left.setdefault(A[:, column].tobytes(), []).append(column)
    found = []
    for column in range(B.shape[1]):
        places = left.get(B[:, column].astype(A.dtype).tobytes())
        if not places:
            raise ValueError(f"find_permutation: column {column} of B is no column of A.")
        found.append(places.pop())
    return found


def make_grouped(A: Sequence[int]) -> list[tuple[int, ...]]:
    """The groups of four of a permutation, each in ascending order."""
    return [tuple(sorted(A[i : i + 4])) for i in range(0, len(A), 4)]


def common_groups(A: Sequence[int], B: Sequence[int]) -> list[tuple[int, ...]]:
    """Groups of four that both have, wherever they stand, in the order of ``A``."""
    others = set(make_grouped(B))
    return [group for group in make_grouped(A) if group in others]


def remove_common_groups(A: Sequence[int], B: Sequence[int]) -> tuple[list[int], list[int]]:
    """Both without the groups of four that they have in common."""
    common = set(common_groups(A, B))

    def left(permutation: Sequence[int]) -> list[int]:
        groups = zip(range(0, len(permutation), 4), make_grouped(permutation), strict=True)
        return [c for i, group in groups if group not in common for c in permutation[i : i + 4]]

    return left(A), left(B)


def group_differences(A: Sequence[int], B: Sequence[int]) -> list[tuple[int, int]]:
    """Positions in ``B`` whose group of four in ``A``, at the same place, lacks their column."""
    groups = make_grouped(A)
    return [(i, column) for i, column in enumerate(B) if column not in groups[i // 4]]


def dictify(wrong_entries: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    """What :func:`group_differences` returns, by group: the columns that do not belong there."""
    by_group: dict[int, list[int]] = {}
    for position, column in wrong_entries:
        by_group.setdefault(position // 4, []).append(column)
    return by_group


def swap_and_correct(permutation: Sequence[int], src: int, tgt: int) -> list[int]:
    """Swap what is at two positions, and put the columns of both groups in ascending order."""
    swapped = list(permutation)
    swapped[src], swapped[tgt] = swapped[tgt], swapped[src]
    for group in {src // 4, tgt // 4}:
        swapped[4 * group : 4 * group + 4] = sorted(swapped[4 * group : 4 * group + 4])
    return swapped


def move_groups_to_match(B: Sequence[int], A: Sequence[int], debug: bool = False) -> list[int]:
    """Put the groups of ``B`` where ``A`` has most of their columns; the most alike come first."""
    own, wanted = make_grouped(B), make_grouped(A)
    alike = [
        (-len(set(group) & set(target)), to, come)
        for come, group in enumerate(own)
        for to, target in enumerate(wanted)
    ]
    places: dict[int, int] = {}
    for _, to, come in sorted(alike):
        if to not in places and come not in places.values():
            places[to] = come
    if debug:
        print(f"move_groups_to_match: {places}")
    return [c for to in range(len(wanted)) for c in B[4 * places[to] : 4 * places[to] + 4]]


def move_permutation_towards(B: Sequence[int], A: Sequence[int], debug: bool = False) -> list[int]:
    """Make one swap in ``B`` that brings its groups nearer to those of ``A``."""
    moved = move_groups_to_match(B, A, debug)
    wrong = group_differences(A, moved)
    if not wrong:
        return moved
    groups = make_grouped(A)
    place, column = wrong[0]
    home = next(i for i, group in enumerate(groups) if column in group)
    there = [i for i, _ in wrong if i // 4 == home]
    # The one that belongs here, if there is one, so that both are right then.
    other = next((i for i in there if moved[i] in groups[place // 4]), there[0])
    moved[place], moved[other] = moved[other], moved[place]
    return moved


def permutation_distance(
    A: Sequence[int],
    B: Sequence[int],
    matrix: np.ndarray | None = None,
    magnitude_targets: Sequence[float] | None = None,
    debug: bool = False,
    verbosity: int = 0,
) -> int | tuple[int, list[int | None]]:
    """Count the swaps by which :func:`move_permutation_towards` turns the groups of B into A's.

    Args:
        matrix, magnitude_targets: on the way from ``B`` to ``A``, look when 2:4 pruning of the
            matrix keeps as much as each target.
        debug, verbosity: say what is done; above 0, what each swap keeps of the matrix.

    Returns:
        How many swaps; with targets also after how many each is reached, None for one that is not.
    """
    present, count = move_groups_to_match(B, A, debug), 0
    targets = list(magnitude_targets or ())
    reached: list[int | None] = [None] * len(targets)
    while True:
        if matrix is not None:
            kept = sum_after_2_to_4(matrix[:, present])
            reached = [
                count if at is None and kept >= target else at
                for at, target in zip(reached, targets, strict=True)
            ]
            if verbosity > 0:
                print(f"permutation_distance: after {count} swaps {kept:.6g} is retained")
        if not group_differences(A, present):
            break
        present, count = move_permutation_towards(present, A, debug), count + 1
    return count if matrix is None or magnitude_targets is None else (count, reached)
