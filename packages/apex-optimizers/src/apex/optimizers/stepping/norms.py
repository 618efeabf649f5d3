"""The norm of all gradients of a step, and what it decides: clipping, and skipping the step."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .buckets import Bucket, ask
from .sharding import norms_of, placement_of


def norm_of_gradients(buckets: list[Bucket], wide: bool = False) -> Tensor:
    """Norm [1] of all gradients of these buckets, without waiting for a device.

    Args:
        wide: in float64. Else float32 where all gradients are of one dtype of up to 32 bits.

    Raises:
        RuntimeError: a gradient is sparse or does not match its parameter.
    """
    return ask(buckets, _norm_of_all, buckets, wide)


def _norm_of_all(buckets: list[Bucket], wide: bool) -> Tensor:
    lists: dict[tuple, list[Bucket]] = {}
    for bucket in buckets:
        if not all(map(Tensor.is_contiguous, bucket.used)):  # the norm wants them without gaps
            bucket.match()
        grad = bucket.grads[0]
        lists.setdefault((grad.device, grad.dtype, placement_of(grad)), []).append(bucket)
    norms = [
        norms_of([g for bucket in own for g in bucket.used], own[0].grads[0], False, wide)
        for own in lists.values()
    ]
    if len(norms) == 1:
        return norms[0]
    device = norms[0].device
    return torch.cat([norm.to(device, torch.float64) for norm in norms]).norm().reshape(1)


@dataclasses.dataclass(frozen=True)
class NormLimits:
    """What the norm of all gradients decides of one step."""

    max_norm: float | None = None  # gradients are clipped to it
    skip_nonfinite: bool = False
    skip_above: float | None = None  # steps with a larger norm are skipped

    @classmethod
    def of(
        cls, optimizer: str, max_norm: object, skip_nonfinite: object, skip_above: object
    ) -> NormLimits | None:
        """From the arguments of ``step``; None where they ask for nothing.

        Raises:
            ValueError: a limit is negative, NaN, or no number.
        """
        if max_norm is None and skip_above is None and not skip_nonfinite:
            return None
        limits = {"max_norm": max_norm, "skip_above": skip_above}
        for name, limit in limits.items():
            is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
            if limit is not None and not (is_number and limit >= 0):
                raise ValueError(
                    f"{optimizer}.step: {name} must be a number >= 0 in gradient units, or None, "
                    f"got {limit!r}."
                )
        return cls(max_norm, bool(skip_nonfinite), skip_above)

    @property
    def may_skip(self) -> bool:
        return self.skip_nonfinite or self.skip_above is not None

    def clip(self, norm: Tensor) -> Tensor | None:
        """What gradients are multiplied by, as in ``torch.nn.utils.clip_grad_norm_``; float64."""
        if self.max_norm is None:
            return None
        # A number divided by a tensor would be the number times an inverse, rounded twice.
        limit = torch.full_like(norm, self.max_norm, dtype=torch.float64)
        return (limit / (norm.double() + 1e-6)).clamp_(max=1.0)

    def skips(self, norm: Tensor) -> Tensor:
        """1 where the step is to be skipped, else 0; float32, shaped as ``norm``."""
        skips = torch.zeros_like(norm, dtype=torch.bool)
        if self.skip_nonfinite:
            skips = ~norm.isfinite()
        if self.skip_above is not None:
            skips = skips | (norm > self.skip_above)
        return skips.float()
