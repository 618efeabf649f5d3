"""Buckets of the LAMB optimizers, and the norm of all gradients that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..stepping.buckets import Bucket
from ..stepping.numbers import norm_of_gradients
from ..stepping.sharding import reduce_over_shards


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
        norm = norm_of_gradients(buckets)
        if inv_scale is not None:
            norm = norm * inv_scale.to(norm.device, norm.dtype)
    for bucket in buckets:
        bucket.grad_norm = None if norm is None else norm.to(bucket.params[0].device)
