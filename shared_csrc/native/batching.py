"""How ``torch.func.vmap`` and batched gradients run operators: a batch of rows is more rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_registered: dict[Any, Mapping[int, int | None]] = {}  # at imports, which have their own lock


def register_vmap(op: Any, rows: Mapping[int, int | None]) -> None:
    """Register a rule for ``op``; without one torch warns, and runs it once per sample.

    Args:
        op: an operator whose results are made of rows, if ``rows`` names any argument.
        rows: position of each argument that is made of rows, and how many dimensions its row has,
            see :func:`row_dims`. If it is empty, or another argument is batched, the op runs once
            per sample.
    """

    def rule(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        batched = {i for i, d in enumerate(in_dims) if d is not None}
        sample = next(iter(batched))
        size = arguments[sample].shape[in_dims[sample]]
        if rows and batched <= rows.keys() and _lead(arguments, in_dims, rows) > 0:
            return _as_rows(op, size, in_dims, arguments, rows)
        return one_by_one(op, size, in_dims, arguments)

    if op not in _registered:  # two functions may share a backward
        _registered[op] = dict(rows)
        torch.library.register_vmap(op, rule)
    elif _registered[op] != rows:
        raise ValueError(f"{op}: vmap has the rule {_registered[op]}, and cannot also have {rows}.")


def _lead(
    arguments: Sequence[Any], in_dims: Sequence[int | None], rows: Mapping[int, int | None]
) -> int:
    """How many dimensions come before a row's in each sample."""
    sizes = {
        i: arguments[i].dim() - (in_dims[i] is not None)
        for i, dims in rows.items()
        if dims is not None and arguments[i] is not None
    }
    return min(size - row_dims(size, rows[i]) for i, size in sizes.items())


def row_dims(dims: int, of_row: int) -> int:
    """How many dimensions a row has in a tensor of ``dims``: ``of_row``, or -1 for one less."""
    return of_row if of_row >= 0 else dims + of_row


def _as_rows(
    op: Any,
    size: int,
    in_dims: Sequence[int | None],
    arguments: Sequence[Any],
    rows: Mapping[int, int | None],
) -> Any:
    given = list(arguments)
    for i in rows:
        tensor, dim = given[i], in_dims[i]
        if tensor is not None:
            batch = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            given[i] = batch.flatten(0, 1).contiguous()
    results = op(*given)
    unflat = lambda result: result.unflatten(0, (size, result.shape[0] // size))
    if isinstance(results, Tensor):
        return unflat(results), 0
    return tuple(map(unflat, results)), (0,) * len(results)


def one_by_one(op: Any, size: int, in_dims: Sequence[int | None], arguments: Sequence[Any]) -> Any:
    """Run ``op`` once per sample: what a rule of ``vmap`` returns."""
    results = [
        op(
            *(
                a if d is None else a.select(d, i).contiguous()
                for a, d in zip(arguments, in_dims, strict=True)
            )
        )
        for i in range(size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(r) for r in zip(*results, strict=True)), (0,) * len(results[0])
