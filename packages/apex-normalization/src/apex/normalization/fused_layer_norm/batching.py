"""How ``torch.func.vmap`` and batched gradients run the operators: a batch of rows is more rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._shared.native.batching import one_by_one, register_vmap


def batch_rows(op: Any, with_rows: int) -> None:
    """Register a rule for a forward ``op`` that takes a batch of rows as more rows.

    It holds where only the first ``with_rows`` arguments, which have the rows, are batched; else,
    as with a batch of weights, the op runs once per element of the batch.
    """

    def rule(info: Any, in_dims: Sequence[int | None], *arguments: Any):
        size = info.batch_size
        if any(d is not None for d in in_dims[with_rows:]):
            return one_by_one(op, size, in_dims, arguments)
        rows = [_leading(a, d, size) for a, d in zip(arguments[:with_rows], in_dims, strict=False)]
        results = op(*rows, *arguments[with_rows:])
        # Those that are not of a row's shape are statistics, [size * rows].
        shape = rows[0].shape
        shaped = (r if r.shape == shape else r.view(size, r.numel() // size) for r in results)
        return tuple(shaped), (0,) * len(results)

    torch.library.register_vmap(op, rule)


def batch_one_by_one(op: Any) -> None:
    """Register a rule for ``op`` that runs it once per element of the batch."""
    register_vmap(op, {})


def _leading(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    moved = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return moved.contiguous()
