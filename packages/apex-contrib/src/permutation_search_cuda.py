"""Apex's extension module of permutation searches, over NumPy arrays; it runs on the CPU.

Importable only where the kernels can run, because callers take the import as that answer. A stripe
is four adjacent columns. Results are written to the arrays that are given for them, the same at any
number of threads. ``blocks`` and ``threads`` of a GPU's launch are accepted, and do nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

import apex.contrib.sparsity.retained_magnitude as _op
from apex.contrib._ops import library
from apex.contrib.sparsity.permutation_search_kernels.windows import (
    Moves as _Moves,
)
from apex.contrib.sparsity.permutation_search_kernels.windows import (
    channel_magnitudes as _channel_magnitudes,
)
from apex.contrib.sparsity.permutation_search_kernels.windows import (
    swaps as _swaps,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

library.require_for_import(__name__, "retained_magnitude")

__all__ = ["build_permute_map", "build_swap_map", "check_permutations", "sum_after_2_to_4"]


def sum_after_2_to_4(
    matrix: NDArray,
    rows: int,
    cols: int,
    start: int,
    end: int,
    blocks: int,
    threads: int,
    out: NDArray,
) -> None:
    """Write to ``out[0]`` what 2:4 pruning keeps of columns ``start`` to ``end``, ends of stripes.

    ``matrix`` is ``[rows, cols]``, also flat, float32 or float64.

    Raises:
        ValueError: sizes do not fit, or ``start`` and ``end`` are no ends of stripes.
    """
    magnitudes = _magnitudes("sum_after_2_to_4", matrix, rows, cols)
    if not 0 <= start <= end <= cols or start % 4 or end % 4:
        raise ValueError(
            f"sum_after_2_to_4: start and end must be multiples of 4, 0 to {cols}, got {start} and "
            f"{end}."
        )
    fours = torch.arange(start, end).view(-1, 4)
    out.flat[0] = float(_op.retained_magnitude(magnitudes, fours).double().sum())


def build_permute_map(
    matrix: NDArray,
    rows: int,
    cols: int,
    stripes: NDArray,
    num_groups: int,
    group_width: int,
    permutations: NDArray,
    perm_length: int,
    improvements: NDArray,
    best_indices: NDArray,
) -> None:
    """Find the best of some permutations for each group of stripes.

    Args:
        stripes: integers ``[num_groups, group_width]``; a group is ``group_width`` stripes.
        permutations: integers ``[P, perm_length]`` with ``perm_length = 4 * group_width``, of the
            columns of a group.
        improvements: ``[num_groups]``; what the best keeps more than the given order, 0 if nothing.
        best_indices: ``[num_groups]``, the row of ``permutations``; the first where nothing is
            gained, which should be the identity.

    Raises:
        ValueError: sizes do not fit, or a number is no stripe or no column.
    """
    if perm_length != 4 * group_width:
        raise ValueError(
            f"perm_length must be 4 * group_width, {4 * group_width}, got {perm_length}."
        )
    name = "build_permute_map"
    magnitudes = _magnitudes(name, matrix, rows, cols)
    table = _array(name, "permutations", permutations, (-1, perm_length))
    if not np.array_equal(np.sort(table, axis=1), np.tile(np.arange(perm_length), (len(table), 1))):
        raise ValueError(f"{name}: permutations: a row lacks some of 0 to {perm_length - 1}.")
    identity = np.arange(perm_length)[None]
    moves = _Moves.of(np.concatenate([identity, table]))
    windows = _windows(name, "stripes", stripes, (num_groups, group_width), cols)
    gains, chosen = moves.best(magnitudes, windows)
    improvements.flat[:num_groups] = gains.numpy()
    best_indices.flat[:num_groups] = (chosen - 1).clamp(min=0).numpy()


def check_permutations(
    matrix: NDArray,
    rows: int,
    cols: int,
    stripe_groups: NDArray,
    group_width: int,
    num_groups: int,
    permutations: NDArray,
    num_permutations: int,
    improvement: NDArray,
    permutation: NDArray,
) -> None:
    """:func:`build_permute_map` with its arguments in another order.

    ``permutations`` is ``[num_permutations, 4 * group_width]``; ``improvement`` and ``permutation``
    are ``[num_groups]``.
    """
    length = 4 * group_width
    table = _array("check_permutations", "permutations", permutations, (num_permutations, length))
    groups = (stripe_groups, num_groups, group_width)
    build_permute_map(matrix, rows, cols, *groups, table, length, improvement, permutation)


def build_swap_map(
    matrix: NDArray, rows: int, cols: int, stripe_pairs: NDArray, output: NDArray
) -> None:
    """Write to ``output [N, 16]`` what each swap of columns of two stripes gains, or loses.

    Swap ``4 * i + j`` exchanges column ``i`` of the first stripe with ``j`` of the second, for each
    of ``stripe_pairs [N, 2]``.
    """
    magnitudes = _magnitudes("build_swap_map", matrix, rows, cols)
    windows = _windows("build_swap_map", "stripe_pairs", stripe_pairs, (-1, 2), cols)
    values = _swaps().values(magnitudes, windows).numpy()
    output.flat[: 16 * len(values)] = (values[:, 1:] - values[:, :1]).ravel()


def _array(name: str, argument: str, array: NDArray, shape: tuple[int, ...]) -> NDArray:
    try:
        return np.asarray(array).astype(np.int64).reshape(shape)
    except ValueError:
        got = list(np.shape(array))
        raise ValueError(f"{name}: {argument} must be {list(shape)}, got {got}.") from None


def _magnitudes(name: str, matrix: NDArray, rows: int, cols: int) -> torch.Tensor:
    if np.size(matrix) != rows * cols:
        raise ValueError(f"{name}: matrix must be [{rows}, {cols}], got {list(np.shape(matrix))}.")
    return _channel_magnitudes(name, np.asarray(matrix).reshape(rows, cols))


def _windows(
    name: str, argument: str, stripes: NDArray, shape: tuple[int, ...], cols: int
) -> torch.Tensor:
    """The columns of groups of stripes."""
    groups = _array(name, argument, stripes, shape)
    if groups.size and not 0 <= groups.min() <= groups.max() < cols // 4:
        raise ValueError(f"{name}: {argument}: a number is not a stripe, 0 to {cols // 4 - 1}.")
    return torch.from_numpy(groups[:, :, None] * 4 + np.arange(4)).flatten(1)
