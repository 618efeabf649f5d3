"""What optimizers hold in C++ between steps, seen and prevented."""

from typing import Any

import pytest

from apex.optimizers.stepping import held_lists


class PlainLists:
    """While it is entered, lists are never held."""

    def __enter__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(held_lists, "MIN_TENSORS", 10**9)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def holders(optimizer: Any) -> list[held_lists.HeldLists]:
    """The owners of the lists that are held for an optimizer now."""
    buckets = [bucket for group in optimizer._buckets._groups for bucket in group.buckets]
    found = [bucket._holder for bucket in buckets if bucket._holder]
    return [holder.held for holder in found if holder.held is not None]
