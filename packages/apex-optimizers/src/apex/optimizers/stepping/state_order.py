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
        if len(state) == len(self._keys) and all(map(operator.is_, state, self._keys)):
            return True
        self._keys = list(state)
        self._positions = dict(zip(map(id, self._keys), itertools.count()))
        return False

    def positions(self, params: Sequence[Tensor]) -> list[int] | None:
        """Where the entries of these parameters are, until :meth:`update` returns False.

        None: they are all there are, in this order. -1: there is none.
        """
        positions = [self._positions.get(id(p), -1) for p in params]
        return None if positions == list(range(len(self._keys))) else positions
