"""Fragments of parameters, and the buckets that hold their states, gradients and new values.

Names of classes and fields are Apex's: NeMo reads them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Range = tuple[int, int]
Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]  # of state, gradients and parameters sent


@dataclass(slots=True, eq=False)  # compared by identity; frozen would take twice as long to make
class ParameterFragment:
    """A part of a parameter that lies in one bucket; ranges are ``(begin, end)`` in elements.

    Attributes:
        param_range: in the flat parameter.
        bucket_range: in the bucket.
        in_local_shard: whether some of it lies in this rank's shard. Only then are there:
        shard_range: in the shard.
        shard_bucket_range, shard_param_range: the same part in the bucket and in the parameter.
    """

    param_group_id: int
    param_id: int
    bucket_id: int
    param_range: Range
    bucket_range: Range
    in_local_shard: bool
    shard_range: Range | None
    shard_bucket_range: Range | None
    shard_param_range: Range | None


def make_fragment(
    where: tuple[int, int, int], param_range: Range, bucket_start: int, shard: Range
) -> ParameterFragment:
    """The fragment at ``bucket_start`` of a bucket of which this rank has ``shard``.

    Args:
        where: ids of group, parameter and bucket.
    """
    size = param_range[1] - param_range[0]
    begin = max(bucket_start, shard[0])
    end = min(bucket_start + size, shard[1])
    inside = begin < end
    shift = param_range[0] - bucket_start
    return ParameterFragment(
        *where,
        param_range,
        (bucket_start, bucket_start + size),
        inside,
        (begin - shard[0], end - shard[0]) if inside else None,
        (begin, end) if inside else None,
        (begin + shift, end + shift) if inside else None,
    )


class StateBucket:
    """Optimizer state of this rank's shard of a bucket.

    Attributes:
        params_shard: with ``store_params``, values in ``dtype``.
        param_remainders_shard: with ``store_param_remainders``, int16.
        exp_avg_shard, exp_avg_sq_shard: the moments, in ``dtype``.
        state_scales: with scaled states, float32 [local fragments, 3]: what the stored parameter,
            ``exp_avg`` and ``exp_avg_sq`` of a fragment are multiplied by.
        fragments: all ranks' fragments, those of no elements included.
    """

    def __init__(
        self,
        bucket_size: int,
        shard_size: int,
        dtype: torch.dtype,
        device: torch.device,
        grad_sync_dtype: torch.dtype,
        param_sync_dtype: torch.dtype,
        contiguous_buffer_offset: int = 0,
        store_params: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        self.bucket_size, self.shard_size = bucket_size, shard_size
        self.dtype, self.device = dtype, device
        self.grad_sync_dtype, self.param_sync_dtype = grad_sync_dtype, param_sync_dtype
        self.contiguous_buffer_offset = contiguous_buffer_offset
        self.filled_size, self.able_to_fill = 0, True
        self.fragments: list[ParameterFragment] = []
        self._cuts: tuple[int, list[int], list[int]] = (0, [], [])

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(shard_size, dtype=dtype, device=device)

        self.params_shard = zeros(dtype) if store_params else None
        self.param_remainders_shard = zeros(torch.int16) if store_param_remainders else None
        self.exp_avg_shard, self.exp_avg_sq_shard = zeros(dtype), zeros(dtype)
        self.state_scales: Tensor | None = None

    def dtypes(self) -> Dtypes:
        """dtypes of the state, of gradients that are sent and of parameters that are sent."""
        return self.dtype, self.grad_sync_dtype, self.param_sync_dtype

    def cut(self, memory: Tensor) -> tuple[dict[int, Tensor], list[Tensor]]:
        """Views of the fragments in a whole bucket's memory by where they begin, and of the rest.

        They are split in one call; where to is kept until there are more fragments.
        """
        if self._cuts[0] != len(self.fragments):
            ranges = [fragment.bucket_range for fragment in self.fragments]
            sizes, begins, at = [], [], 0
            for begin, end in sorted((begin, end) for begin, end in ranges if begin < end):
                for stop, start in ((begin, -1), (end, begin)):
                    if at < stop:
                        sizes.append(stop - at)
                        begins.append(start)  # -1: between fragments
                        at = stop
            if at < self.bucket_size:
                sizes.append(self.bucket_size - at)
                begins.append(-1)
            self._cuts = len(self.fragments), sizes, begins
        _, sizes, begins = self._cuts
        slots: dict[int, Tensor] = {}
        gaps = []
        for begin, part in zip(begins, memory.split(sizes), strict=True):
            if begin < 0:
                gaps.append(part)
            else:
                slots[begin] = part
        return slots, gaps

    def local_fragments(self) -> list[ParameterFragment]:
        """Those that this rank has a part of."""
        return [fragment for fragment in self.fragments if fragment.in_local_shard]


class GradientStatus(enum.Enum):
    """How far a bucket's gradients are."""

    READY = enum.auto()  # nothing is under way
    PARTIALLY_FILLED = enum.auto()
    FULLY_FILLED = enum.auto()
    SYNCING = enum.auto()


class GradientBucket:
    """Gradients of one bucket, before and after their reduction.

    Attributes:
        grads_bucket: what this rank has added up since the last reduction, or None.
        grads_shard: this rank's shard of what was reduced so far, or None.
        sync_grads_shard, sync_request: the result of a reduction under way, and what to wait for.
        grads_generated: fragments that have arrived since the last reduction.
        arrived: of those, the ones whose gradients are still where autograd put them.
        written: begins of the fragments in ``grads_bucket`` that hold gradients.
        slots: parts of ``grads_bucket`` by where they begin.
        gaps: parts of ``grads_bucket`` between them, and behind them.
        copies, additions: pairs of a slot and what is to be copied or added to it.
        adding: begins of the slots in ``additions``.
    """

    def __init__(self) -> None:
        self.grads_shard: Tensor | None = None
        self.grads_bucket: Tensor | None = None
        self.sync_grads_shard: Tensor | None = None
        self.status = GradientStatus.READY
        self.sync_request: Any = None
        self.grads_generated: set[ParameterFragment] = set()
        self.arrived: list[ParameterFragment] = []
        self.written: set[int] = set()
        self.slots: dict[int, Tensor] = {}
        self.gaps: list[Tensor] = []
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.additions: list[tuple[Tensor, Tensor]] = []
        self.adding: set[int] = set()


class ParameterStatus(enum.Enum):
    """How far a bucket's new parameters are."""

    SHARDED = enum.auto()
    SYNCING = enum.auto()
    READY = enum.auto()


class ParameterBucket:
    """New parameters of one bucket, on their way from shards to all ranks.

    Attributes:
        params_shard: this rank's new values.
        params_bucket: everybody's.
        params_updated: ``(group id, parameter id)`` of those that have been copied out, or that
            were frozen at the step.
        params_held: of all in the bucket, once somebody has asked.
        slots: parts of ``params_bucket`` by where they begin, once somebody has asked.
    """

    def __init__(self) -> None:
        self.params_shard: Tensor | None = None
        self.params_bucket: Tensor | None = None
        self.status = ParameterStatus.SHARDED
        self.sync_request: Any = None
        self.params_updated: set[tuple[int, int]] = set()
        self.params_held: set[tuple[int, int]] | None = None
        self.slots: dict[int, Tensor] = {}


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest in memory.

    Raises:
        ValueError: the elements do not fill their memory, in whatever order.
    """
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d))
    if not tensor.permute(order).is_contiguous():
        raise ValueError(
            f"DistributedFusedAdam: params: a parameter of shape {list(tensor.shape)} and strides "
            f"{list(tensor.stride())} has gaps in its memory. Optimize the tensor that it is a "
            "view of, or a contiguous copy."
        )
    return tuple(order)


def flat_view(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor in the order of memory, sharing it."""
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    return tensor.detach().permute(memory_order(tensor)).view(-1)


def flat_like(param: Tensor, values: Tensor) -> Tensor:
    """``values``, in the parameter's shape, in the order of its memory; may be a copy."""
    return values.detach().permute(memory_order(param)).reshape(-1)


def shaped_view(param: Tensor, flat: Tensor) -> Tensor:
    """Elements in the order of the parameter's memory, in its shape and memory format."""
    order = memory_order(param)
    back = [order.index(d) for d in range(len(order))]
    return flat.view([param.shape[d] for d in order]).permute(back)


def positions(groups: Sequence[dict[str, Any]]) -> dict[int, tuple[int, int]]:
    """Ids of group and parameter by ``id(param)``."""
    return {id(p): (g, i) for g, group in enumerate(groups) for i, p in enumerate(group["params"])}
