"""One entrance to the searches, as Apex has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .channel_swap import progressive_channel_swap
from .exhaustive_search import Exhaustive_Search

_OPTIONS = {
    "exhaustive": {"stripe_group_size": 8, "escape_attempts": 100},
    "progressive channel swap": {
        "progressive_search_time_limit": 60,
        "improvement_threshold": 1e-9,
    },
    "user defined": {},
}


def accelerated_search_for_good_permutation(
    matrix_group: Any, options: Mapping[str, Any] | None = None, verbosity: int = 0
) -> list[int]:
    """Search for an order of columns in which 2:4 pruning keeps much of a matrix.

    Args:
        matrix_group: array or tensor ``[rows, columns]``, columns a multiple of 4: the weights that
            share these columns, below each other.
        options: ``strategy``: ``"exhaustive"`` (default) with ``stripe_group_size`` (8) and
            ``escape_attempts`` (100); ``"progressive channel swap"`` with
            ``progressive_search_time_limit`` (60 s) and ``improvement_threshold`` (1e-9); or
            ``"user defined"``, which changes nothing. ``seed`` (1) is of what is random.
        verbosity: above 0, say what is done.

    Returns:
        Column ``i`` of the new order is column ``permutation[i]``.

    Raises:
        ValueError: an unknown strategy or option, or a matrix of another shape. (Apex prints a
            message about the strategy, and changes nothing.)
    """
    given = dict(options or {})
    strategy, seed = given.pop("strategy", "exhaustive"), given.pop("seed", 1)
    if strategy not in _OPTIONS:
        raise ValueError(
            f"options: strategy must be one of {', '.join(_OPTIONS)}, got {strategy!r}."
        )
    if unknown := sorted(given.keys() - _OPTIONS[strategy].keys()):
        known = ", ".join([*_OPTIONS[strategy], "seed"])
        raise ValueError(f"options: {strategy} has no {', '.join(unknown)}, but {known}.")
    chosen = _OPTIONS[strategy] | given
    columns = matrix_group.shape[1]
    if verbosity > 0:
        print(f"[ASP] {strategy} search for an order of {columns} channels")
    if strategy == "exhaustive":
        return Exhaustive_Search(matrix_group, seed=seed, **chosen)[2]
    if strategy == "progressive channel swap":
        limit, threshold = chosen.values()
        return progressive_channel_swap(matrix_group, limit, threshold, seed)
    return list(range(columns))
