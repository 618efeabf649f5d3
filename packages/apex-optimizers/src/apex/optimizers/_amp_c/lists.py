"""Lists of tensors as legacy functions take them, and their checks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Lists = Sequence[Sequence[Tensor]]


def checked_lists(op: str, tensor_lists: Lists, names: tuple[str, ...]) -> list[list[Tensor]]:
    """The lists as lists; the operators check the tensors in them."""
    if len(tensor_lists) != len(names):
        raise RuntimeError(
            f"{op}: tensor_lists.size() != depth: expected {len(names)} lists "
            f"({', '.join(names)}), got {len(tensor_lists)}."
        )
    lists = [list(tensors) for tensors in tensor_lists]
    lengths = {name: len(tensors) for name, tensors in zip(names, lists, strict=True)}
    if len(set(lengths.values())) > 1:
        raise RuntimeError(f"{op}: Size mismatch among tensor lists: their lengths are {lengths}.")
    return lists
