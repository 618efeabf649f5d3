"""Finds the states of parameters fast, and keeps none of them alive between steps."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor


def are_same(a: Collection[Any], b: Collection[Any]) -> bool:
    """Whether both consist of the very same objects, in one order."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


class StateOrder:
    """The order of an optimizer's state, by which entries are found without hashing tensors.

    No entry is kept alive: removing it from the state, or clearing the state, frees its memory.
    """

    def __init__(self) -> None:
        self._keys: list[Any] = []
        self._positions: dict[int, int] = {}  # by id of the key

    def update(self, state: dict[Any, Any]) -> bool:
        """Remember the order; return whether it is the remembered one."""
        if are_same(state, self._keys):
            return True
        self._keys = list(state)
        self._positions = dict(zip(map(id, self._keys), itertools.count()))
        return False

    def entries(self, params: Sequence[Tensor]) -> Entries:
        """Where the entries of these parameters are, until :meth:`update` returns False."""
        return Entries([self._positions.get(id(p), -1) for p in params], len(self._keys))


class Entries:
    """Where the entries of some parameters are in a state."""

    def __init__(self, positions: list[int], total: int) -> None:
        self._positions = None if positions == list(range(total)) else positions

    def of(self, values: list[Any]) -> list[Any]:
        """Those entries.

        Args:
            values: all of the state, and behind them None for parameters that have no entry.
        """
        if self._positions is None:
            return values[:-1]
        return [values[position] for position in self._positions]
