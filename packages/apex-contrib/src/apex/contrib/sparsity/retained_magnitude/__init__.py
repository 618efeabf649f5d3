"""The operator that searches for channel permutations spend their time in."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._ops import library


@library.define("retained_magnitude(Tensor magnitudes, Tensor fours) -> Tensor")
def retained_magnitude(magnitudes: Tensor, fours: Tensor) -> Tensor:
    """Sum, for each set of four channels, what 2:4 pruning keeps of them: two of four in each row.

    ``magnitudes`` is ``[channels, rows]``, contiguous, not negative, of any floating-point dtype;
    ``fours`` is int64 ``[N, 4]``, on the same device. The result is ``[N]``, float64 for float64
    and else float32. Each sum is taken by one thread, in an order that depends on nothing but the
    processor's vector width: any number of threads gives the same bits.

    RuntimeError for a number in ``fours`` that is no channel, on a CPU; on a GPU, where raising
    would wait for the device, the set's result is NaN, and nothing is read out of bounds.
    """
    dtype = torch.promote_types(magnitudes.dtype, torch.float32)
    return magnitudes.new_empty([fours.shape[0]], dtype=dtype)
