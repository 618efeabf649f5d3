"""Buckets: the parameters of a group that one launch can update, and their cached lists."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._gradients import check_dense, check_gradients, match_layouts
from ._sharding import is_sharded, local_tensors, placement_of

MASTER = "master_param"


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """What an optimizer keeps per parameter, and what its messages call it."""

    optimizer: str
    moments: tuple[str, ...]  # keys of tensors like the parameter, in the order of the operator
    has_masters: bool = False  # whether there may be float32 copies of 16-bit parameters
    counts_steps: bool = True  # whether a parameter's state holds "step"
    counts_group_steps: bool = True  # whether the group holds "step"
    grad_name: str = "grad"  # the parameters' attribute that holds the gradient
    any_grad_dtype: bool = False  # whether gradients may differ in dtype from their parameter


def state_dtype(param: Tensor) -> torch.dtype | None:
    """Dtype of the moments of a parameter; None if the parameter's dtype is not supported."""
    if param.dtype == torch.float64:
        return torch.float64
    if param.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return torch.float32
    return None


class Bucket:
    """Parameters of one group with one device, dtype and step count.

    ``step`` in the state of all parameters is one shared tensor, so that counting a step is one
    operation, whatever the number of parameters.
    """

    writing_ops: tuple[Callable[..., None], ...] = ()  # which write to gradients, too

    def __init__(
        self, layout: StateLayout, group: dict[str, Any], params: list[Tensor], states: list[dict]
    ) -> None:
        self.layout = layout
        self.group = group
        self.params = params
        self.states = states
        self.grads: list[Tensor] = []  # of the step that is being taken
        self.is_sharded = is_sharded(params[0])

    @property
    def step_tensor(self) -> Tensor:
        return self.states[0]["step"]

    @property
    def step_number(self) -> int:
        return int(self.step_tensor)

    def set_step(self, step: int) -> None:
        self.step_tensor.fill_(step)

    @property
    def has_masters(self) -> bool:
        return MASTER in self.states[0]

    def check(self) -> None:
        """Raise if a gradient cannot be used, before anything is changed."""
        _check(self.layout, self.params, self.grads)

    def state_lists(self) -> tuple[list[Tensor], ...]:
        """One list per moment, then that of the masters, which is empty if there are none."""
        lists = [[state[key] for state in self.states] for key in self.layout.moments]
        if self.layout.has_masters:
            lists.append([state[MASTER] for state in self.states] if self.has_masters else [])
        return tuple(lists)

    def run(self, op: Callable[..., None], *hyper: Any) -> None:
        """Call a step operator on the lists; gradients of another layout are copied first."""
        call, grads = self.bind(op, hyper), self.local(self.grads)
        try:
            call(grads)
        except (RuntimeError, NotImplementedError):
            self.check()
            matched = match_layouts(self.local(self.params), grads)
            if all(map(operator.is_, matched, grads)):
                raise
            call(matched)
            if op in self.writing_ops:
                for own, copy in zip(grads, matched, strict=True):
                    if own is not copy:
                        own.copy_(copy)
        # Autograd then notices a backward pass over values from before the step.
        torch.autograd.graph.increment_version(self.params)

    def bind(self, op: Callable[..., None], hyper: tuple) -> Callable[[list[Tensor]], None]:
        """The operator as a function of the gradients alone."""
        params, *states = map(self.local, (self.params, *self.state_lists()))
        return lambda grads: op(params, grads, *states, *hyper)

    def local(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors, or of DTensors the shards of this process."""
        return local_tensors(tensors) if self.is_sharded else tensors


class StateWatch:
    """Notices when somebody put other dicts into the state of an optimizer."""

    def __init__(self) -> None:
        self._state: Any = None
        self._entries: list[dict] = []

    def is_same(self, state: dict[Tensor, dict]) -> bool:
        """Whether the state consists of the same dicts as when it was last remembered."""
        return (
            state is self._state
            and len(state) == len(self._entries)
            and all(map(operator.is_, state.values(), self._entries))
        )

    def remember(self, state: dict[Tensor, dict]) -> None:
        if not self.is_same(state):
            self._state, self._entries = state, list(state.values())


class BucketCache:
    """The buckets of all groups, rebuilt when parameters, gradients or states were replaced."""

    def __init__(self, bucket_class: type[Bucket] = Bucket) -> None:
        self._bucket_class = bucket_class
        self._groups: list[_GroupBuckets | None] = []
        self._state = StateWatch()

    def collect(self, optimizer: Any) -> list[Bucket]:
        """Buckets with this step's gradients, of all groups that have any."""
        buckets: list[Bucket] = []
        grad_of = operator.attrgetter(optimizer.layout.grad_name)
        if not self._state.is_same(optimizer.state):
            self._groups.clear()
        self._groups += [None] * (len(optimizer.param_groups) - len(self._groups))
        lists = [list(map(grad_of, group["params"])) for group in optimizer.param_groups]
        missing = [[grad is None for grad in grads] for grads in lists]
        new = []
        for index, group in enumerate(optimizer.param_groups):
            cached = self._groups[index]
            if cached is None or not cached.fits(group, missing[index]):
                new.append(index)
                # Of all groups before any state is made: a step that fails changes nothing.
                present = [i for i, absent in enumerate(missing[index]) if not absent]
                params = [group["params"][i] for i in present]
                _check(optimizer.layout, params, [lists[index][i] for i in present])
        for index in new:
            group = optimizer.param_groups[index]
            self._groups[index] = _GroupBuckets(
                self._bucket_class, optimizer, group, missing[index]
            )
        for cached, grads in zip(self._groups, lists, strict=False):
            cached.set_grads(grads)
            buckets += cached.buckets
        self._state.remember(optimizer.state)
        return buckets

    def drop_grads(self) -> None:
        """Forget this step's gradients."""
        for group in self._groups:
            for bucket in group.buckets if group else ():
                bucket.grads = []


def _check(layout: StateLayout, params: list[Tensor], grads: list[Tensor]) -> None:
    """Raise if a gradient or a parameter cannot be used."""
    where = f"{layout.optimizer}.step"
    check_gradients(where, params, grads, layout.any_grad_dtype)
    check_dense(where, params)


class _GroupBuckets:
    """The buckets of one group for one pattern of present gradients."""

    def __init__(
        self,
        bucket_class: type[Bucket],
        optimizer: Any,
        group: dict[str, Any],
        missing: list[bool],
    ) -> None:
        self._group = group
        self._params = list(group["params"])
        self._missing = missing
        self._indices: list[list[int]] = []
        self.buckets: list[Bucket] = []
        present = [i for i, absent in enumerate(missing) if not absent]
        self._make(bucket_class, optimizer, present)

    def fits(self, group: dict[str, Any], missing: list[bool]) -> bool:
        """Whether no parameter of these buckets and no pattern of gradients has changed."""
        return (
            group is self._group
            and missing == self._missing
            and len(group["params"]) == len(self._params)
            and all(map(operator.is_, group["params"], self._params))
        )

    def set_grads(self, grads: list[Tensor]) -> None:
        for bucket, indices in zip(self.buckets, self._indices, strict=True):
            bucket.grads = grads if len(indices) == len(grads) else [grads[i] for i in indices]

    def _make(self, bucket_class: type[Bucket], optimizer: Any, present: list[int]) -> None:
        chosen: dict[tuple, list[int]] = {}
        for index in present:
            param = self._params[index]
            count = optimizer.init_state(self._group, param)
            has_master = MASTER in optimizer.state[param]
            key = (param.device, param.dtype, placement_of(param), has_master, count)
            chosen.setdefault(key, []).append(index)
        for (device, *_, count), indices in chosen.items():
            params = [self._params[i] for i in indices]
            states = [optimizer.state[p] for p in params]
            if optimizer.layout.counts_steps:
                shared = _step_tensor(optimizer.capturable, count, device)
                for state in states:
                    state["step"] = shared
            self._indices.append(indices)
            self.buckets.append(bucket_class(optimizer.layout, self._group, params, states))


def _step_tensor(capturable: bool, count: int, device: torch.device) -> Tensor:
    if capturable:
        return torch.tensor([count], dtype=torch.int32, device=device)
    return torch.tensor(float(count), dtype=torch.float32)  # as torch.optim keeps it, on the CPU
