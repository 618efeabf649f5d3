"""Notices what was written into 16-bit parameters beside their masters."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from torch import Tensor

_version_of = operator.attrgetter("_version")

Mark = tuple[int, int]  # a tensor's count of changes in place, and where its memory is
_UNKNOWN: Mark = (-1, -1)


class MasterMarks:
    """The state in which a step left parameters that have masters.

    If a parameter was changed since, for instance by ``load_state_dict`` of its model or by
    ``clamp_``, its values replace the master's wherever they differ from the rounded master.
    Otherwise the next step would undo the change. ``param.data.clamp_()`` changes no count and is
    not noticed.
    """

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._addresses: list[int] = []

    def take(self, params: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """Remember how parameters are now.

        Args:
            shards: of DTensors, whose own addresses mean nothing; else the parameters again.
        """
        self._versions = list(map(_version_of, params))
        self._addresses = list(map(Tensor.data_ptr, shards))

    def count(self) -> None:
        """Count a change of the parameters that the optimizer made itself."""
        self._versions = [version + 1 for version in self._versions]

    def known(self, params: Iterable[Tensor]) -> dict[int, Mark]:
        """What is remembered, by ``id`` of the parameter."""
        marks = zip(self._versions, self._addresses, strict=True)
        return dict(zip(map(id, params), marks, strict=False))  # no mark where no master is

    def set_known(self, params: Iterable[Tensor], known: dict[int, Mark]) -> None:
        """Take over what others remembered."""
        marks = [known.get(id(param), _UNKNOWN) for param in params]
        self._versions, self._addresses = map(list, zip(*marks, strict=True))

    def changed(self, params: Sequence[Tensor], shards: Sequence[Tensor]) -> list[int]:
        """Numbers of the parameters that were changed since :meth:`take`, or were never seen."""
        versions, addresses = list(map(_version_of, params)), list(map(Tensor.data_ptr, shards))
        if versions == self._versions and addresses == self._addresses:
            return []
        before = zip(self._versions, self._addresses, strict=True)
        now = zip(versions, addresses, strict=True)
        return [i for i, (old, new) in enumerate(zip(before, now, strict=True)) if old != new]
