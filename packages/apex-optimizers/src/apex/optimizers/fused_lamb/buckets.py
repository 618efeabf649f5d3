"""Buckets of the LAMB optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..stepping.buckets import Bucket
from ..stepping.sharding import reduce_over_shards


class LambBucket(Bucket):
    """A bucket whose shards are stepped in two passes, with a sum over all shards between."""

    def run(self, values: Sequence[Any]) -> None:
        if self.is_sharded:
            device = self.params[0].device
            squares = torch.zeros(len(self.params), 2, dtype=torch.float64, device=device)
            super().run([*values, squares, 1])
            reduce_over_shards(squares, self.params[0])
            values = [*values, squares, 2]
        super().run(values)
