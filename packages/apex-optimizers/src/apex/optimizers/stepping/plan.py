"""The buckets of all groups, which are kept from step to step."""

from __future__ import annotations

import operator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from .buckets import MASTER, Bucket, Members
from .gradients import check_dense, check_gradients, check_states
from .rounding import check_rounded
from .sharding import placement_of
from .state_order import Entries, StateOrder, are_same

_shape_of = operator.attrgetter("shape")


class BucketCache:
    """The buckets of all groups, rebuilt when parameters, gradients or states were replaced."""

    def __init__(self, bucket_class: type[Bucket] = Bucket) -> None:
        self._bucket_class = bucket_class
        self._groups: list[_GroupBuckets | None] = []
        self._order = StateOrder()
        self._marks: dict[int, tuple[int, int]] = {}  # of parameters in buckets that were given up
        # Parameters in buckets that were made for this step, and their states from before.
        self._started: list[tuple[Tensor, dict[str, Any] | None]] = []

    def collect(self, optimizer: Any) -> list[Bucket]:
        """Buckets with this step's gradients, of all groups that have any.

        All gradients and states are checked before a state is made or changed. If there is one
        bucket only and it is not new, the kernel itself checks everything before it writes.

        Raises:
            RuntimeError: a gradient, parameter or state cannot be used.
        """
        self._started = []
        wanted = [_Wanted(optimizer, group) for group in optimizer.param_groups]
        if not self._order.update(optimizer.state):
            self.forget()
        if len(self._groups) != len(wanted):
            missing = len(wanted) - len(self._groups)
            self._groups = self._groups[: len(wanted)] + [None] * missing
        values = [*optimizer.state.values(), None]
        new = [
            index
            for index, (cached, group) in enumerate(zip(self._groups, wanted, strict=True))
            if not (cached and cached.fits(group) and cached.hand_over(values, group.grads))
        ]
        buckets = self._buckets()
        if new or len(buckets) > 1 or (optimizer.keeps_masters and _differ_in_dtype(buckets)):
            kept = [i for i in range(len(wanted)) if i not in new]
            new += [i for i in kept if self._groups[i].is_outdated()]
        if new:
            for group in wanted:  # a step that fails changes nothing
                group.check(optimizer)
            self._renew(optimizer, new, wanted)
            return self._buckets()
        any_dtype = optimizer.layout.any_grad_dtype
        if len(buckets) > 1 or (any_dtype and _differ_in_shape(buckets)):
            for bucket in buckets:
                bucket.check_new_gradients()
        return buckets

    def forget(self) -> None:
        """Make all buckets anew in the next step."""
        for bucket in self._buckets():
            self._marks.update(bucket.marks.known(bucket.params))
        self._groups.clear()

    def take_back(self, state: dict[Any, Any]) -> None:
        """Undo what was made of states for buckets that a failing step did not come to.

        All buckets are made anew in the next step: the failure may have left half of them.
        """
        changed = {id(p) for bucket in self._buckets() if bucket.has_run for p in bucket.params}
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
        for bucket in self._buckets():
            bucket.drop()

    def _buckets(self) -> list[Bucket]:
        if len(self._groups) == 1 and self._groups[0]:
            return self._groups[0].buckets
        return [bucket for group in self._groups if group for bucket in group.buckets]

    def _renew(self, optimizer: Any, indices: list[int], wanted: list[_Wanted]) -> None:
        for index in indices:
            old = self._groups[index]
            for bucket in old.buckets if old else ():
                self._marks.update(bucket.marks.known(bucket.params))
            made = self._groups[index] = _GroupBuckets(wanted[index])
            made.make(self._bucket_class, optimizer, wanted[index], self._started)
        has_grown = not self._order.update(optimizer.state)
        values = [*optimizer.state.values(), None]
        for index, cached in enumerate(self._groups):
            if index in indices or has_grown:  # what was all of the state is a part of it now
                cached.find(self._order)
            if index in indices:
                cached.take_marks(self._marks)
            cached.hand_over(values, wanted[index].grads)
            if index in indices:
                cached.remember()
        self._marks = {}


class _Wanted:
    """What a group is in this step."""

    __slots__ = ("copies", "grads", "group", "keys", "lists", "missing", "params", "sources")

    def __init__(self, optimizer: Any, group: dict[str, Any]) -> None:
        self.group = group
        self.keys: tuple[str, ...] = optimizer.state_keys(group)
        self.params, self.sources, self.copies = optimizer.linked(group)
        self.grads = _grads_of(optimizer.layout.grad_name, self.sources)
        self.missing = list(map(operator.is_, self.grads, repeat(None)))
        # What has to stay the same for buckets to stay.
        is_own = self.sources is self.params
        self.lists = (self.params,) if is_own else (self.params, self.sources, self.copies)

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


def _differ_in_dtype(buckets: list[Bucket]) -> bool:
    """Whether parameters of another dtype than before need a master now, or none any longer."""
    return any(p.dtype != bucket.dtype for bucket in buckets for p in bucket.params)


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

    def __init__(self, wanted: _Wanted) -> None:
        self._group, self._keys, self._missing = wanted.group, wanted.keys, wanted.missing
        self._lists = tuple(map(list, wanted.lists))
        self._indices: list[list[int]] = []
        self._entries: list[Entries] = []
        self.buckets: list[Bucket] = []

    def fits(self, wanted: _Wanted) -> bool:
        """Whether no parameter of these buckets and no pattern of gradients has changed."""
        return (
            self._group is wanted.group
            and self._keys == wanted.keys
            and self._missing == wanted.missing
            and len(self._lists) == len(wanted.lists)
            and all(map(are_same, self._lists, wanted.lists))
        )

    def hand_over(self, values: list[Any], grads: list[Tensor | None]) -> bool:
        """Give buckets the gradients and states of a step; return whether the states fit them.

        Args:
            values: see :meth:`Entries.of`.
        """
        fits = True
        for bucket, indices, entries in zip(
            self.buckets, self._indices, self._entries, strict=True
        ):
            fits &= bucket.take(_chosen(grads, indices), entries.of(values))
        return fits

    def is_outdated(self) -> bool:
        return not all(bucket.is_as_remembered() for bucket in self.buckets)

    def make(
        self,
        bucket_class: type[Bucket],
        optimizer: Any,
        wanted: _Wanted,
        started: list[tuple[Tensor, dict[str, Any] | None]],
    ) -> None:
        """Make the buckets, and states where they are missing; add to ``started`` what was."""
        layout, states = optimizer.layout, optimizer.state
        chosen: dict[tuple, list[int]] = {}
        for index, (param, grad) in enumerate(zip(wanted.params, wanted.grads, strict=True)):
            if grad is None:
                continue
            before = states.get(param)
            started.append((param, dict(before) if before else None))
            count = optimizer.init_state(wanted.group, param)
            optimizer.conform_state(wanted.group, param)
            copy = wanted.copies[index] if wanted.copies else None
            kind = (
                param.device,
                param.dtype,
                placement_of(wanted.sources[index]),
                grad.dtype,
                None if copy is None else copy.dtype,
                MASTER in states.get(param, ()),
            )
            chosen.setdefault((*kind, count), []).append(index)
        for (device, *_, count), indices in chosen.items():
            params = list(_chosen(wanted.params, indices))
            is_own = wanted.sources is wanted.params
            sources = params if is_own else _chosen(wanted.sources, indices)
            copies = _chosen(wanted.copies, indices)
            if copies and copies[0] is None:
                copies = []
            members = Members(params, sources, copies, [states.get(p) for p in params])
            if layout.counts_steps:
                shared = _step_tensor(optimizer.capturable, count, device)
                for state in members.states:
                    state["step"] = shared
            self._indices.append(indices)
            self.buckets.append(bucket_class(layout, wanted.group, wanted.keys, members, count))

    def find(self, order: StateOrder) -> None:
        """Find the entries of the state."""
        self._entries = [order.entries(bucket.params) for bucket in self.buckets]

    def take_marks(self, marks: dict[int, tuple[int, int]]) -> None:
        """Take over what is known of parameters from buckets that were given up."""
        for bucket in self.buckets:
            bucket.marks.set_known(bucket.params, marks)

    def remember(self) -> None:
        for bucket in self.buckets:
            bucket.remember()


def _step_tensor(capturable: bool, count: int, device: torch.device) -> Tensor:
    if capturable:
        return torch.tensor([count], dtype=torch.int32, device=device)
    # As torch.optim keeps it, on the CPU.
    return torch.tensor(float(count), dtype=torch.float32, device="cpu")
