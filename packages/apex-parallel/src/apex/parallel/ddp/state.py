"""What DistributedDataParallel keeps between calls, what users may read of it, and pickling."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import checks
from .groups import OwnGroup, take_groups
from .lanes import Lane, make_lanes
from .plan import BucketPlanner, Plan
from .reduction import BucketReduction, ReductionOptions
from .slots import BucketSlots


@dataclass
class RuntimeState:
    """Attributes that belong to one process or one backward: made anew, never pickled."""

    world_size: float | None = None  # None until attached to a process group
    active_params: list[Tensor] = field(default_factory=list)  # require gradients, in order
    _active_dtypes: list[torch.dtype] = field(default_factory=list)  # of their gradients
    needs_refresh: bool = True  # the next backward agrees on buckets
    allreduce_buffers: list[Tensor | None] = field(default_factory=list)  # by bucket, if retained
    main_stream: Any = None  # the accelerator stream of the last forward
    allreduce_communicators: Any = None
    _device: torch.device | None = None
    _world: weakref.ref | None = None  # the default process group when last attached
    _lanes: list[Lane] = field(default_factory=list)
    _own_groups: list[OwnGroup] = field(default_factory=list)  # those of the lanes, if not given
    _hooks: dict[int, Any] = field(default_factory=dict)  # id(param) -> handle
    _slots: BucketSlots | None = None  # None until ranks have agreed on buckets
    _planner: BucketPlanner | None = None  # records a backward while there are no slots
    _index_of: dict[int, int] = field(default_factory=dict)  # id(param) -> index in active_params
    _with_news: set[int] = field(default_factory=set)  # id(param): grad not reduced since it grew
    _gradient_streams: set[Any] = field(default_factory=set)
    _pending: list[tuple[int, BucketReduction]] = field(default_factory=list)
    _end_of_backward: weakref.ref | None = None
    _forward_done: bool = False  # a forward has prepared a backward, not reduced yet
    _reducing: bool = False  # the running backward has brought a gradient to reduce
    _delayed: bool = False  # delay_allreduce at the time of the last forward


class ReductionModule(nn.Module):
    """Base of DistributedDataParallel: a wrapped module with options and runtime state."""

    def _reset_runtime(self) -> None:
        self.__dict__.update(vars(RuntimeState()))

    def __getstate__(self) -> dict[str, Any]:
        """Module and options; process groups, streams, hooks and gradients in flight stay here."""
        left_out = {entry.name for entry in fields(RuntimeState)}
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore module, options and hooks; the first reduced backward opens the lanes."""
        super().__setstate__(state)
        self._reset_runtime()
        self.create_hooks()

    def _connect(self) -> None:
        """Attach to the default process group, which may have been destroyed and made again."""
        checks.require_process_group(checks.NAME)
        self._device = checks.parameters_device(self.module)
        self._lanes, self._own_groups = [], []
        self._slots, self.needs_refresh = None, True
        self._world = weakref.ref(dist.group.WORLD)
        self.world_size = float(dist.get_world_size())

    def _open_lanes(self) -> None:
        """Get process groups and streams, a collective call.

        Not part of attaching, so that one rank may run a copy, for instance to evaluate it.
        """
        if self.allreduce_communicators is not None:
            pairs = zip(*self.allreduce_communicators, strict=True)
            self._lanes = [Lane(group, stream, self._device) for group, stream in pairs]
            return
        self._own_groups = take_groups(self.num_allreduce_streams, self, self._device)
        self._lanes = make_lanes([own.group for own in self._own_groups], self._device)

    def _settle(self, settled: bool) -> None:
        """Note whether the collectives begun on the wrapper's own groups have all ended well."""
        for own in self._own_groups:
            own.settled = settled

    def _options(self) -> ReductionOptions:
        return ReductionOptions(
            world_size=dist.get_world_size(),
            average=self.gradient_average,
            predivide_factor=self.gradient_predivide_factor,
            always_fp32=self.allreduce_always_fp32,
        )

    def _new_planner(self) -> BucketPlanner:
        triggers = self.allreduce_trigger_params
        if triggers is not None:
            triggers = checks.trigger_indices(triggers, self.active_params)
        return BucketPlanner(
            numels=[param.numel() for param in self.active_params],
            kinds=self._active_dtypes,
            message_size=self.message_size,
            triggers=triggers,
        )

    @property
    def callback_queued(self) -> bool:
        """Whether a backward is running at whose end gradients are reduced.

        The autograd engine holds the only reference to the callback and drops it when a backward
        ends or fails, so this cannot go stale.
        """
        return self._end_of_backward is not None and self._end_of_backward() is not None

    @property
    def buckets(self) -> list[list[Tensor | None]]:
        """The gradients that have arrived, by bucket and slot; empty before the first backward."""
        if not self._slots:
            return []
        grads = [param.grad for param in self.active_params]
        return [
            [grads[i] if arrived else None for i, arrived in zip(bucket, flags, strict=True)]
            for bucket, flags in zip(self.active_i_buckets, self._slots.arrived, strict=True)
        ]

    @property
    def bucket_sizes(self) -> list[int]:
        """Number of parameters in each bucket."""
        return self._slots.bucket_sizes if self._slots else []

    @property
    def num_buckets(self) -> int:
        """Number of buckets; 0 before the first backward."""
        return len(self.bucket_sizes)

    @property
    def active_i_buckets(self) -> Plan:
        """For each bucket, the positions of its parameters in ``active_params``."""
        return self._slots.active_i_buckets if self._slots else []

    @property
    def next_bucket(self) -> int:
        """The bucket that leaves next."""
        return self._slots.next_bucket if self._slots else 0

    @property
    def ready_buckets_not_reduced(self) -> set[int]:
        """Complete buckets that wait for an earlier one."""
        return self._slots.ready_buckets_not_reduced if self._slots else set()

    @property
    def bucket_streams(self) -> list[Any]:
        """The streams that buckets rotate over; None entries on the CPU."""
        return [lane.stream for lane in self._lanes]

    @property
    def bucket_events(self) -> list[Any]:
        """For each stream, the event recorded after its last bucket; None entries on the CPU."""
        return [lane.event for lane in self._lanes]

    @property
    def bucket_pgs(self) -> list[dist.ProcessGroup]:
        """The process groups that buckets rotate over."""
        return [lane.group for lane in self._lanes]
