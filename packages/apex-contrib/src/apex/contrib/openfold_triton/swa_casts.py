"""FusedAdamSWA's launches: as they are, or on wider temporaries for dtypes without a kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def wide(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of moments, and in which a step computes: float64 if one is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


class Launch(NamedTuple):
    """The operator's lists, and what is rounded to the tensors of users behind it."""

    lists: list[list[Tensor]]
    rounded: list[tuple[Tensor, Tensor]]  # (where to, what), in order

    def is_direct(self) -> bool:
        """Whether the lists are those of users."""
        return not self.rounded

    def finish(self) -> None:
        """Write what the operator has left in temporaries."""
        for tensor, result in self.rounded:
            tensor.copy_(result)


def launch_of(lists: list[list[Tensor]]) -> Launch:
    """The launch of parameters, gradients, both moments, copies and averages of one batch.

    Kernels exist for float64 alone, and for float32 parameters whose copies are float32, float16 or
    bfloat16. Other pairs are computed in the wider of their dtypes, and in float32 at least; then
    the parameters are rounded, and the copies are made of the rounded ones.
    """
    params, copies = lists[0], lists[4]
    own, of_copies = params[0].dtype, copies[0].dtype
    dtype = wide(own, of_copies)
    if own == dtype and (of_copies == dtype or dtype == torch.float32):
        return Launch(lists, [])
    given = [[tensor.to(dtype) for tensor in tensors] for tensors in lists]
    rounded = [
        (tensor, result)
        for i in (0, 2, 3, 5)
        for tensor, result in zip(lists[i], given[i], strict=True)
        if result is not tensor
    ]
    return Launch(given, [*rounded, *zip(copies, params, strict=True)])
