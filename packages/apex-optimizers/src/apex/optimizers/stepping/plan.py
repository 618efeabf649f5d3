"""The buckets of all groups, which are kept from step to step."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from .buckets import MASTER, Bucket, Members
from .checks import check_dense, check_gradients, check_rounded, check_states
from .sharding import placement_of

_dtype_of = operator.attrgetter("dtype")
_shape_of = operator.attrgetter("shape")
_is_as_remembered = operator.methodcaller("is_as_remembered")


class BucketCache:
    """The buckets of all groups, rebuilt when parameters, gradients or states were replaced."""

    def __init__(self) -> None:
        self._groups: list[_GroupBuckets | None] = []
        self.buckets: list[Bucket] = []  # of all groups
        self._order = StateOrder()
        # Of parameters in buckets that were given up.
        self._master_versions: dict[int, tuple[int, int]] = {}
        # Parameters in buckets that were made for this step, and their states from before.
        self._started: list[tuple[Tensor, dict[str, Any] | None]] = []

    def collect(self, optimizer: Any) -> list[Bucket]:
        """Buckets with this step's gradients, of all groups that have any.

        All gradients and states are checked before a state is made or changed. If there is one
        bucket only and it is not new, the kernel itself checks everything before it writes.

        Raises:
            RuntimeError: a gradient, parameter or state cannot be used.
        """
        groups, state = optimizer.param_groups, optimizer.state
        if not self._order.update(state):
            self.forget()
        if len(self._groups) != len(groups):
            missing = len(groups) - len(self._groups)
            self._groups = self._groups[: len(groups)] + [None] * missing
            self.buckets = [b for group in self._groups if group for b in group.buckets]
        values, new = [*state.values(), None], []
        for index, (cached, group) in enumerate(zip(self._groups, groups, strict=True)):
            if cached is None or not cached.take(optimizer, group, values):
                new.append(index)
        buckets = self.buckets
        if new or len(buckets) > 1:
            kept = [i for i in range(len(groups)) if i not in new]
            new += [i for i in kept if not all(map(_is_as_remembered, self._groups[i].buckets))]
        if new:
            self._renew(optimizer, new)
        elif len(buckets) > 1 or (optimizer.layout.any_grad_dtype and _differ_in_shape(buckets)):
            for bucket in buckets:
                bucket.check_new_gradients()
        return self.buckets

    def is_outdated(self) -> bool:
        """Whether a step was refused because parameters or states are not those of the buckets.

        No bucket has run then, so that the step can begin anew.
        """
        if any(bucket.has_run for bucket in self.buckets):
            return False
        return not all(bucket.is_new or bucket.can_be_walked() for bucket in self.buckets)

    def forget(self) -> None:
        """Make all buckets anew in the next step."""
        for bucket in self.buckets:
            self._master_versions.update(bucket.master_versions.known(bucket.params))
        self._groups, self.buckets = [], []

    def roll_back(self, state: dict[Any, Any]) -> None:
        """Undo what was made of states for buckets that a failing step did not come to.

        All buckets are made anew in the next step: the failure may have left half of them.
        """
        changed = {id(p) for bucket in self.buckets if bucket.has_run for p in bucket.params}
        for param, before in self._started:
            if id(param) in changed:
                continue
            if before is None:
                state.pop(param, None)
            else:
                state[param].clear()
                state[param].update(before)
        self.forget()

    def drop(self) -> None:
        """Hold no gradient and no state any longer."""
        self._started = []
        for bucket in self.buckets:
            bucket.grads, bucket.used, bucket.states, bucket.lists = [], [], [], ()
            bucket.has_run = False

    def _renew(self, optimizer: Any, indices: list[int]) -> None:
        current = [_CurrentGroup(optimizer, group) for group in optimizer.param_groups]
        for group in current:  # a step that fails changes nothing
            group.check(optimizer)
        for index in indices:
            old = self._groups[index]
            for bucket in old.buckets if old else ():
                self._master_versions.update(bucket.master_versions.known(bucket.params))
            made = self._groups[index] = _GroupBuckets(optimizer, current[index])
            made.make(optimizer, current[index], self._started)
        self.buckets = [bucket for group in self._groups for bucket in group.buckets]
        has_grown = not self._order.update(optimizer.state)
        values = [*optimizer.state.values(), None]
        for index, cached in enumerate(self._groups):
            if index in indices or has_grown:  # what was all of the state is a part of it now
                cached.find(self._order)
            fresh = cached.buckets if index in indices else []
            for bucket in fresh:
                bucket.master_versions.set_known(bucket.params, self._master_versions)
            cached.take(optimizer, current[index].group, values)
            for bucket in fresh:
                bucket.remember()
        self._master_versions = {}


class StateOrder:
    """The order of an optimizer's state, by which entries are found without hashing tensors.

    No entry is kept alive: removing it from the state, or clearing the state, frees its memory.
    """

    def __init__(self) -> None:
        self._keys: list[Any] = []
        self._positions: dict[int, int] = {}  # by id of the key

    def update(self, state: dict[Any, Any]) -> bool:
        """Remember the order; return whether it is the remembered one."""
        if len(state) == len(self._keys) and all(map(operator.is_, state, self._keys)):
            return True
        self._keys = list(state)
        self._positions = {id(key): position for position, key in enumerate(self._keys)}
        return False

    def positions(self, params: Sequence[Tensor]) -> list[int] | None:
        """Where the entries of these parameters are, until :meth:`update` returns False.

        None: they are all there are, in this order. -1: there is none.
        """
        positions = [self._positions.get(id(p), -1) for p in params]
        return None if positions == list(range(len(self._keys))) else positions


class _CurrentGroup:
    """What a group is in this step."""

    __slots__ = ("copies", "grads", "group", "keys", "lists", "missing", "params", "sources")

    def __init__(self, optimizer: Any, group: dict[str, Any]) -> None:
        self.group = group
        self.keys: tuple[str, ...] = optimizer.state_keys(group)
        params = group["params"]
        has_copies = optimizer.layout.has_copies
        self.lists = optimizer.linked(group) if has_copies else (params, params, [])
        self.params, self.sources, self.copies = self.lists
        self.grads = _grads_of(optimizer.layout.grad_name, self.sources)
        self.missing = list(map(operator.is_, self.grads, repeat(None)))

    def check(self, optimizer: Any) -> None:
        """Raise unless everything can be used."""
        chosen = [i for i, is_missing in enumerate(self.missing) if not is_missing]
        lists = (self.params, self.sources, self.grads)
        params, sources, grads = ([one[i] for i in chosen] for one in lists)
        layout, where = optimizer.layout, f"{optimizer.layout.optimizer}.step"
        check_gradients(where, sources, grads, layout.any_grad_dtype)
        check_dense(where, params)
        if optimizer.stochastic_rounding:
            check_rounded(where, params)
        states = [optimizer.state.get(p, {}) for p in params]
        states = [{key: state[key] for key in optimizer.keys_in(state)} for state in states]
        check_states(where, params, states, (*self.keys, MASTER))


def _grads_of(name: str, params: list[Tensor]) -> list[Tensor | None]:
    try:
        return list(map(operator.attrgetter(name), params))
    except AttributeError:  # not torch's own attribute, which every parameter has
        return [getattr(param, name, None) for param in params]


def _differ_in_shape(buckets: list[Bucket]) -> bool:
    """Whether gradients that torch did not check have another shape: kernels count elements."""
    return any(
        list(map(_shape_of, bucket.grads)) != list(map(_shape_of, bucket.params))
        for bucket in buckets
    )


def _chosen(tensors: list[Any], indices: list[int]) -> list[Any]:
    return tensors if len(indices) >= len(tensors) else [tensors[i] for i in indices]


class _GroupBuckets:
    """The buckets of one group for one pattern of present gradients."""

    def __init__(self, optimizer: Any, current: _CurrentGroup) -> None:
        self._group, self._keys, self._missing = current.group, current.keys, current.missing
        self._lists = tuple(map(list, current.lists))
        self._switch = optimizer.switch
        self._is_switched = bool(current.group.get(self._switch))
        self._grad_of = operator.attrgetter(optimizer.layout.grad_name)
        self._dtypes = list(map(_dtype_of, current.params))
        self._indices: list[list[int] | None] = []  # None: all
        self._entries: list[list[int] | None] = []  # see StateOrder.positions
        self.buckets: list[Bucket] = []

    def take(self, optimizer: Any, group: dict[str, Any], values: list[Any]) -> bool:
        """Give buckets the gradients and states of a step; return whether these are theirs still.

        They are not where a parameter, its dtype, its state, or the pattern of gradients has
        changed.

        Args:
            values: all of the state, and behind them None for parameters that have no entry.
        """
        if group is not self._group or bool(group.get(self._switch)) != self._is_switched:
            return False
        params, sources = group["params"], group["params"]
        lists: Any = (params,)
        if optimizer.layout.has_copies:
            lists = params, sources, _ = optimizer.linked(group)
        for own, now in zip(self._lists, lists, strict=False):
            if len(own) != len(now) or not all(map(operator.is_, own, now)):
                return False
        if list(map(_dtype_of, params)) != self._dtypes:
            return False
        try:
            grads = list(map(self._grad_of, sources))
        except AttributeError:  # not torch's own attribute, which every parameter has
            grads = _grads_of(optimizer.layout.grad_name, sources)
        if list(map(operator.is_, grads, repeat(None))) != self._missing:
            return False
        fits = True
        for bucket, indices, places in zip(self.buckets, self._indices, self._entries, strict=True):
            own = grads if indices is None else [grads[i] for i in indices]
            states = values[:-1] if places is None else [values[i] for i in places]
            fits = bucket.take(own, states) and fits
        return fits

    def make(
        self,
        optimizer: Any,
        current: _CurrentGroup,
        started: list[tuple[Tensor, dict[str, Any] | None]],
    ) -> None:
        """Make the buckets, and states where they are missing; add to ``started`` what was."""
        layout, states = optimizer.layout, optimizer.state
        chosen: dict[tuple, list[int]] = {}
        for index, (param, grad) in enumerate(zip(current.params, current.grads, strict=True)):
            if grad is None:
                continue
            before = states.get(param)
            started.append((param, dict(before) if before else None))
            count = optimizer.init_state(current.group, param)
            optimizer.conform_state(current.group, param)
            copy = current.copies[index] if current.copies else None
            kind = (
                param.device,
                param.dtype,
                placement_of(current.sources[index]),
                grad.dtype,
                None if copy is None else copy.dtype,
                MASTER in states.get(param, ()),
                None if optimizer.pipeline is None else optimizer.pipeline.part_of(param),
            )
            chosen.setdefault((*kind, count), []).append(index)
        for (device, *_, count), indices in chosen.items():
            params = list(_chosen(current.params, indices))
            is_own = current.sources is current.params
            sources = params if is_own else _chosen(current.sources, indices)
            copies = _chosen(current.copies, indices)
            if copies and copies[0] is None:
                copies = []
            members = Members(params, sources, copies, [states.get(p) for p in params])
            if layout.counts_steps:
                shared = _step_tensor(optimizer.capturable, count, device)
                for state in members.states:
                    state["step"] = shared
            is_all = len(indices) == len(current.params)
            self._indices.append(None if is_all else indices)
            self.buckets.append(
                optimizer.bucket_class(optimizer, current.group, current.keys, members, count)
            )

    def find(self, order: StateOrder) -> None:
        """Find the entries of the state."""
        self._entries = [order.positions(bucket.params) for bucket in self.buckets]


def _step_tensor(capturable: bool, count: int, device: torch.device) -> Tensor:
    if capturable:
        return torch.tensor([count], dtype=torch.int32, device=device)
    # As torch.optim keeps it, on the CPU.
    return torch.tensor(float(count), dtype=torch.float32, device="cpu")
