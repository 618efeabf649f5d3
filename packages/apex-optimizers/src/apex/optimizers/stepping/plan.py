"""The buckets of all groups, which are kept from step to step."""

from __future__ import annotations

import operator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from .buckets import MASTER, Bucket, check_step
from .gradients import check_states
from .sharding import placement_of
from .state_order import Entries, StateOrder

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
        groups = optimizer.param_groups
        lists = [_grads_of(optimizer.layout.grad_name, group["params"]) for group in groups]
        missing = [list(map(operator.is_, grads, repeat(None))) for grads in lists]
        if not self._order.update(optimizer.state):
            self.forget()
        self._groups = self._groups[: len(groups)] + [None] * (len(groups) - len(self._groups))
        values = [*optimizer.state.values(), None]
        new = []
        for index, (cached, group) in enumerate(zip(self._groups, groups, strict=True)):
            fits = cached is not None and cached.fits(group, missing[index])
            if not (fits and cached.hand_over(values, lists[index])):
                new.append(index)
        buckets = self._buckets()
        if new or len(buckets) > 1 or any(map(_has_other_master, repeat(optimizer), buckets)):
            kept = [i for i in range(len(groups)) if i not in new]
            new += [i for i in kept if self._groups[i].is_outdated()]
        if new:
            self._check(optimizer, lists)
            self._renew(optimizer, new, lists, missing)
        elif len(buckets) > 1 or _differ_in_shape(buckets):
            for bucket in buckets:
                bucket.check_new_gradients()
        return self._buckets()

    def is_outdated(self) -> bool:
        """Whether parameters or states are not those that were checked when buckets were made."""
        return any(group.is_outdated() for group in self._groups if group)

    def forget(self) -> None:
        """Make all buckets anew in the next step."""
        for bucket in self._buckets():
            self._marks.update(bucket.marks.known(bucket.params))
        self._groups.clear()

    def take_back(self, state: dict[Any, Any]) -> None:
        """Undo what was made of states for a step which failed before it changed anything.

        All buckets are made anew in the next step: the failure may have left half of them.
        """
        if self._started and not any(bucket.has_run for bucket in self._buckets()):
            for param, before in self._started:
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
            bucket.grads, bucket.states = [], []

    def _buckets(self) -> list[Bucket]:
        return [bucket for group in self._groups if group for bucket in group.buckets]

    def _check(self, optimizer: Any, lists: list[list[Tensor | None]]) -> None:
        """Raise unless everything can be used: a step that fails changes nothing."""
        layout = optimizer.layout
        for group, grads in zip(optimizer.param_groups, lists, strict=True):
            pairs = [(p, g) for p, g in zip(group["params"], grads, strict=True) if g is not None]
            params, present = [p for p, _ in pairs], [g for _, g in pairs]
            check_step(layout, params, present)
            states = [optimizer.state.get(p, {}) for p in params]
            check_states(f"{layout.optimizer}.step", params, states, (*layout.moments, MASTER))

    def _renew(
        self,
        optimizer: Any,
        indices: list[int],
        lists: list[list[Tensor | None]],
        missing: list[list[bool]],
    ) -> None:
        for index in indices:
            group, old = optimizer.param_groups[index], self._groups[index]
            for bucket in old.buckets if old else ():
                self._marks.update(bucket.marks.known(bucket.params))
            made = _GroupBuckets(group, missing[index])
            self._groups[index] = made
            made.make(self._bucket_class, optimizer, lists[index], self._started)
        has_grown = not self._order.update(optimizer.state)
        values = [*optimizer.state.values(), None]
        for index, cached in enumerate(self._groups):
            if index in indices or has_grown:  # what was all of the state is a part of it now
                cached.find(self._order)
            if index in indices:
                cached.take_marks(self._marks)
            cached.hand_over(values, lists[index])
            if index in indices:
                cached.remember()
        self._marks = {}


def _grads_of(name: str, params: list[Tensor]) -> list[Tensor | None]:
    try:
        return list(map(operator.attrgetter(name), params))
    except AttributeError:  # not torch's own attribute, which every parameter has
        return [getattr(param, name, None) for param in params]


def _has_other_master(optimizer: Any, bucket: Bucket) -> bool:
    """Whether parameters of another dtype than before need a master now, or none any longer."""
    return optimizer.keeps_masters and any(p.dtype != bucket.dtype for p in bucket.params)


def _differ_in_shape(buckets: list[Bucket]) -> bool:
    """Whether gradients that torch did not check have another shape: kernels count elements."""
    return any(
        list(map(_shape_of, bucket.grads)) != list(map(_shape_of, bucket.params))
        for bucket in buckets
        if bucket.layout.any_grad_dtype
    )


class _GroupBuckets:
    """The buckets of one group for one pattern of present gradients."""

    def __init__(self, group: dict[str, Any], missing: list[bool]) -> None:
        self._group = group
        self._params = list(group["params"])
        self._missing = missing
        self._indices: list[list[int]] = []
        self._entries: list[Entries] = []
        self.buckets: list[Bucket] = []

    def fits(self, group: dict[str, Any], missing: list[bool]) -> bool:
        """Whether no parameter of these buckets and no pattern of gradients has changed."""
        return (
            group is self._group
            and missing == self._missing
            and len(group["params"]) == len(self._params)
            and all(map(operator.is_, group["params"], self._params))
        )

    def hand_over(self, values: list[Any], grads: list[Tensor | None]) -> bool:
        """Give buckets the gradients and states of a step; return whether the states fit them.

        Args:
            values: see :meth:`Entries.of`.
        """
        for bucket, indices, entries in zip(
            self.buckets, self._indices, self._entries, strict=True
        ):
            bucket.grads = grads if len(indices) == len(grads) else [grads[i] for i in indices]
            bucket.states = entries.of(values)
            bucket.has_run = False
        return all(bucket.has_own_states() for bucket in self.buckets)

    def is_outdated(self) -> bool:
        try:
            return not all(bucket.is_as_remembered() for bucket in self.buckets)
        except KeyError:  # a moment is gone
            return True

    def make(
        self,
        bucket_class: type[Bucket],
        optimizer: Any,
        grads: list[Tensor | None],
        started: list[tuple[Tensor, dict[str, Any] | None]],
    ) -> None:
        """Make the buckets, and states where they are missing; add to ``started`` what was."""
        chosen: dict[tuple, list[int]] = {}
        any_dtype = optimizer.layout.any_grad_dtype
        for index, (param, grad) in enumerate(zip(self._params, grads, strict=True)):
            if grad is None:
                continue
            before = optimizer.state.get(param)
            started.append((param, dict(before) if before else None))
            count = optimizer.init_state(self._group, param)
            optimizer.conform_state(param)
            has_master = MASTER in optimizer.state[param]
            kind = (
                param.device,
                param.dtype,
                placement_of(param),
                grad.dtype if any_dtype else None,
            )
            chosen.setdefault((*kind, has_master, count), []).append(index)
        for (device, *_, count), indices in chosen.items():
            params = [self._params[i] for i in indices]
            states = [optimizer.state[p] for p in params]
            shared = _step_tensor(optimizer.capturable, count, device)
            for state in states:
                state["step"] = shared
            self._indices.append(indices)
            self.buckets.append(bucket_class(optimizer.layout, self._group, params, states))

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
    return torch.tensor(
        float(count), dtype=torch.float32, device="cpu"
    )  # as torch.optim keeps it, on the CPU
