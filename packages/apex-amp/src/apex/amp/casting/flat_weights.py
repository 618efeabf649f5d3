"""Casts of recurrent layers' weights into one flat tensor, as cuDNN wants them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def flat_size(weights: Sequence[Tensor]) -> int:
    """How many elements :func:`cast_into` needs."""
    offsets = _offsets(weights)
    return max((o + w.numel() for o, w in zip(offsets, weights, strict=True)), default=0)


def cast_into(flat: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The weights in the dtype of ``flat``, as pieces of it; gradients reach the weights.

    Args:
        flat: one-dimensional; overwritten.
        weights: if they are pieces of one tensor, as ``flatten_parameters`` makes them, they keep
            their places in it; else they follow one another.
    """
    places = list(zip(weights, _offsets(weights), strict=True))
    for weight, offset in places:
        flat.narrow(0, offset, weight.numel()).view(weight.shape).copy_(weight)
    # Not the views that were copied to: autograd would make each anew after every later copy.
    return [flat.narrow(0, offset, w.numel()).view(w.shape) for w, offset in places]


def _offsets(weights: Sequence[Tensor]) -> list[int]:
    """Where each weight begins, in elements."""
    storages = {w.untyped_storage().data_ptr() for w in weights}
    if len(storages) == 1 and all(w.is_contiguous() for w in weights):
        first = min(w.storage_offset() for w in weights)
        return [w.storage_offset() - first for w in weights]
    return [sum(w.numel() for w in weights[:i]) for i in range(len(weights))]
