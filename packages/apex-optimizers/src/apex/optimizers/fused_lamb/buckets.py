"""Buckets of the LAMB optimizers, and the norm of all gradients that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apex.multi_tensor_apply.multi_tensor_l2norm import multi_tensor_l2norm

from .._shared.native.writes import call_counted
from ..stepping.buckets import Bucket, ask
from ..stepping.sharding import is_sharded, placement_of, reduce_over_shards


class LambBucket(Bucket):
    """A bucket that knows the norm of the gradients of all parameters of the optimizer."""

    grad_norm: Tensor | None = None  # [1], on the bucket's device; None where nothing is clipped

    def run(self, op: Callable[..., None], *hyper: Any) -> None:
        """Call ``lamb_step``; for shards in two passes, with a sum over all shards between."""
        if not self.is_sharded:
            super().run(op, *hyper)
            return
        device = self.params[0].device
        squares = torch.zeros(len(self.params), 2, dtype=torch.float64, device=device)
        super().run(op, *hyper, squares, 1)
        reduce_over_shards(squares, self.params[0])
        super().run(op, *hyper, squares, 2)


def share_grad_norm(buckets: list[Bucket], inv_scale: Tensor | None = None) -> None:
    """Set ``grad_norm`` of all buckets, if any of them clips.

    Args:
        inv_scale: the norm is multiplied by it.

    Raises:
        RuntimeError: a gradient is sparse or does not match its parameter.
    """
    norm = None
    if any(bucket.group["max_grad_norm"] > 0 for bucket in buckets):
        norm = ask(buckets, _norm_of_all, buckets)
        if inv_scale is not None:
            norm = norm * inv_scale.to(norm.device, norm.dtype)
    for bucket in buckets:
        bucket.grad_norm = None if norm is None else norm.to(bucket.params[0].device)


def _norm_of_alike(buckets: list[Bucket]) -> Tensor:
    """Norm [1] of gradients of one device, dtype and placement; of shards, that of the whole."""
    norm, _ = call_counted(multi_tensor_l2norm, [g for bucket in buckets for g in bucket.used])
    whole = buckets[0].grads[0]
    if not is_sharded(whole):
        return norm
    square = reduce_over_shards(norm.double().square_(), whole)
    return square.sqrt_().to(norm.dtype)


def _norm_of_all(buckets: list[Bucket]) -> Tensor:
    """Norm of gradients of any devices and dtypes, without waiting for a device."""
    lists: dict[tuple, list[Bucket]] = {}
    for bucket in buckets:
        if not all(map(Tensor.is_contiguous, bucket.used)):  # the norm wants them without gaps
            bucket.match()
        grad = bucket.grads[0]
        lists.setdefault((grad.device, grad.dtype, placement_of(grad)), []).append(bucket)
    norms = [_norm_of_alike(own) for own in lists.values()]
    if len(norms) == 1:
        return norms[0]
    device = norms[0].device
    return torch.cat([norm.to(device, torch.float64) for norm in norms]).norm().reshape(1)
