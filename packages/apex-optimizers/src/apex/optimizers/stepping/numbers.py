"""The numbers of a step: on the host, or on the device, where a captured graph reads them anew."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .buckets import Bucket, call_with_repair
from .checks import SEED
from .sharding import norms_of, placement_of, whole_number


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What a GradScaler passes to one step, and whether the norm of gradients skips it."""

    inv_scale: Tensor | None  # float32, one element; None: gradients are not scaled
    found_inf: Tensor | None  # float32, one element; not 0: skip the step. None: 0

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Scaling:
        """From the attributes that ``torch.amp.GradScaler.step`` sets, and the optimizer's own."""
        scale = getattr(optimizer, "grad_scale", None)
        found_inf = whole_number(getattr(optimizer, "found_inf", None))
        skips: Tensor | None = getattr(optimizer, "skips", None)
        if skips is not None and found_inf is not None:
            found_inf = torch.maximum(found_inf.float().to(skips.device).reshape(1), skips)
        elif skips is not None:
            found_inf = skips
        return cls(
            # Rounded once: a division in float32 is not exact on every device.
            None if scale is None else scale.double().reciprocal().float(),
            None if found_inf is None else found_inf.float(),
        )

    def on(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """``inv_scale`` and ``found_inf`` on a device."""
        return tuple(
            None if number is None else number.to(device)
            for number in (self.inv_scale, self.found_inf)
        )

    def counted(self, device: torch.device) -> Tensor | int:
        """By how much this step advances a count: by 0 where it is skipped."""
        found_inf = self.on(device)[1]
        return 1 if found_inf is None else (found_inf == 0).to(torch.int32)


def device_numbers(optimizer: torch.optim.Optimizer, bucket: Bucket) -> dict[str, Any]:
    """Those of a bucket's next step that operators read on its device; nothing waits for it."""
    device, scaling = bucket.params[0].device, Scaling.of(optimizer)
    inv_scale, found_inf = scaling.on(device)
    return {
        "lr": 0.0,
        "step": 0,
        "device_lr": _device_lr(bucket.group, device),
        # This call's flag decides: a skipped step does not count.
        "device_step": bucket.step_tensor + scaling.counted(device),
        "inv_scale": inv_scale,
        "found_inf": found_inf,
    }


def _device_lr(group: dict[str, Any], device: torch.device) -> Tensor:
    """The learning rate, which the group keeps where graphs can read it."""
    lr = group["lr"]
    own = torch.as_tensor(lr, dtype=torch.float32, device=device)
    # Schedulers may have put another number, or a tensor elsewhere, into the group.
    if not isinstance(lr, Tensor) or lr.dtype != own.dtype or lr.device.type != device.type:
        group["lr"] = own
    return own


def advance_on_device(group: dict[str, Any], own: list[Bucket], scaling: Scaling) -> None:
    """Count a step of a group, of which these buckets have just taken part.

    In a tensor of the group alone, and in place: a captured graph reads it anew in every replay.
    """
    count, found_inf = group.get("step"), scaling.found_inf
    if isinstance(count, Tensor) and group["params"]:
        count += scaling.counted(count.device)
        return
    device = numbers_device(group)
    if isinstance(count, Tensor) and found_inf is None:
        count += 1
    elif isinstance(count, Tensor):
        # A group without parameters is where the flag is: no device has to be waited for.
        group["step"] = count.to(found_inf.device).add_(scaling.counted(found_inf.device))
    else:
        first = torch.tensor([count or 0], dtype=torch.int32, device=device)
        steps = [bucket.step_tensor.to(device) for bucket in own]
        group["step"] = torch.stack([first + scaling.counted(device), *steps]).amax(0)


def lr_tensor(lr: float | Tensor) -> Tensor:
    """A learning rate as float32, on its own device."""
    device = lr.device if isinstance(lr, Tensor) else torch.device("cpu")
    return torch.as_tensor(lr, dtype=torch.float32, device=device)


def numbers_device(group: dict[str, Any]) -> torch.device:
    """Where a group's numbers are to be; never torch's default device, which may be "meta"."""
    if group["params"]:
        return group["params"][0].device
    return group["lr"].device if isinstance(group["lr"], Tensor) else torch.device("cpu")


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
    params = (param for group in groups for param in group["params"])
    return next(i for i, param in enumerate(params) if param is bucket.params[0])


def norm_of_gradients(buckets: list[Bucket], wide: bool = False) -> Tensor:
    """Norm [1] of all gradients of these buckets, without waiting for a device.

    Args:
        wide: in float64. Else float32 where all gradients are of one dtype of up to 32 bits.

    Raises:
        RuntimeError: a gradient is sparse or does not match its parameter.
    """
    return call_with_repair(buckets, _norm_of_all, buckets, wide)


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
    ) -> NormLimits:
        """From the arguments of ``step``.

        Raises:
            ValueError: a limit is negative, NaN, or no number.
        """
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
