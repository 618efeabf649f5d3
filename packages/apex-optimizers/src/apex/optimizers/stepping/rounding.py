"""Stochastic rounding: bfloat16 parameters that follow small updates without float32 masters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .buckets import Bucket
from .gradients import describe

SEED = "rounding_seed"  # of a group


def check_seed(optimizer: str, group: dict[str, Any]) -> None:
    """Raise ValueError unless a group's seed fits into 32 bits, which leaves 32 for its bucket."""
    seed = group.get(SEED, 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"{optimizer}: {SEED} must be an int in [0, 2**32), got {seed!r}.")


def check_rounded(where: str, params: Sequence[Tensor]) -> None:
    """Raise TypeError for the first parameter that is rounded, but not by chance: of float16."""
    for index, param in enumerate(params):
        if param.dtype == torch.float16:
            raise TypeError(
                f"{where}: stochastic_rounding is for bfloat16 parameters (float32 and float64 "
                f"ones keep small updates), but params[{index}] is {describe(param)}. Use "
                "bfloat16, or masters instead."
            )


def rounding_key(optimizer: Any, bucket: Bucket) -> int | None:
    """The key of a bucket's random numbers, of 64 bits with sign; None: it is not rounded.

    Beside the seed it has the place of the bucket's first parameter, so that no two buckets of a
    step share numbers.
    """
    if bucket.dtype != torch.bfloat16:
        return None
    if bucket.place is None:
        bucket.place = _place_of(optimizer.param_groups, bucket)
    key = bucket.group[SEED] | (bucket.place << 32)
    return key - 2**64 if key >= 2**63 else key


def _place_of(groups: list[dict[str, Any]], bucket: Bucket) -> int:
    """How many parameters of the optimizer come before the first one of a bucket."""
    before = 0
    for group in groups:
        if group is bucket.group:
            break
        before += len(group["params"])
    return before + next(i for i, p in enumerate(group["params"]) if p is bucket.params[0])
