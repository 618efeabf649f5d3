"""Which parameters of a group one call of a step operator can update, decided once and kept."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .buckets import memory_of, refer_to
from .gradients import check_allocated, check_dense, check_gradients, check_states
from .held_lists import HeldOps, Holder
from .sharding import is_sharded, local_tensors, placement_of
from .state_order import Entries, StateOrder

BUFFER = "momentum_buffer"  # torch.optim.SGD's name for it

_grad_of = operator.attrgetter("grad")
_buffer_of = operator.itemgetter(BUFFER)


@dataclasses.dataclass
class Launch:
    """The lists of one call of a step; all have one length, or are empty where not needed."""

    optimizer: str  # for messages
    group: dict[str, Any]
    params: list[Tensor]  # what is updated: the model's parameters, or their float32 masters
    sources: list[Tensor]  # whose .grad is used
    copies: list[Tensor]  # the model's 16-bit parameters, beside their masters
    grads: list[Tensor]
    buffers: list[Tensor]
    is_first_run: bool
    is_new: bool  # of a division made in this step
    holder: Holder | None = None  # of the division's lists, where the optimizer has such operators
    known: list[weakref.ref[Tensor]] = dataclasses.field(default_factory=list)  # checked buffers
    whole: Tensor | None = None  # the first parameter, where the lists are shards of DTensors

    def check(self) -> None:
        """Raise if a parameter or gradient cannot be used, before anything is changed."""
        self.check_gradients()
        check_dense(f"{self.optimizer}.step", self.params)

    def check_gradients(self) -> None:
        """The same of gradients alone: parameters are those of the last step."""
        check_gradients(f"{self.optimizer}.step", self.sources, self.grads)

    def on_shards(self) -> Launch:
        """The same with the shards of DTensors, which is all that a kernel sees of them."""
        if not is_sharded(self.params[0]):
            return self
        lists = ("params", "copies", "grads", "buffers")
        local = {name: local_tensors(getattr(self, name)) for name in lists}
        return dataclasses.replace(self, whole=self.params[0], **local)

    def ready_holder(self) -> Holder | None:
        """The holder whose lists (all but the gradients) C++ already has, or None."""
        if self.holder is None or self.whole is not None:
            return None
        held = self.holder.lists_of(self.params, (self.buffers, self.copies), self.grads)
        return self.holder if held else None

    def knows_buffers(self) -> bool:
        """Whether these are the buffers that were conformed when the launch was new.

        Raises:
            RuntimeError: the memory of one was given back.
        """
        # A reference to a buffer that is gone gives None, as does a parameter without buffer.
        if self.is_first_run or not refer_to(self.known, self.buffers):
            return False
        check_allocated(f"{self.optimizer}.step", f"state {BUFFER!r} of parameter", self.buffers)
        return True

    def conform_buffers(self, dtype_of: Callable[[Tensor], torch.dtype]) -> None:
        """Make buffers that are missing, or whose dtype, device or layout a checkpoint changed."""
        states = [{} if buffer is None else {BUFFER: buffer} for buffer in self.buffers]
        check_states(f"{self.optimizer}.step", self.params[: len(states)], states, [BUFFER])
        self.buffers = [
            buffer_like(param, buffer, dtype_of(param))
            for param, buffer in zip(self.params, self.buffers, strict=bool(self.buffers))
        ]

    def keep_buffers(self, state: dict[Tensor, Any]) -> None:
        """Make the buffers part of the state."""
        self.known[:] = map(weakref.ref, self.buffers)
        for param, buffer in zip(self.params, self.buffers, strict=bool(self.buffers)):
            state[param][BUFFER] = buffer


class GroupLaunches:
    """Divides a parameter group by device, dtypes and presence of a momentum buffer.

    The division holds until parameters, their memory, or the pattern of missing gradients and
    buffers change. Gradients and buffers themselves are read anew in every step. If there is one
    launch only, the operator itself refuses parameters and buffers that changed, before it writes.
    """

    def __init__(self, optimizer: str, held_ops: HeldOps | None) -> None:
        self._optimizer = optimizer
        self._held_ops = held_ops
        self._entries: Entries | None = None  # of the parameters
        self._lists: tuple[Sequence[Tensor | None], ...] = ()  # params and, with twins, theirs
        self._presence: tuple[Any, ...] = ()  # of momentum, gradients and buffers
        self._memory: list[Any] = []  # of parameters
        self._divisions: list[_Division] = []

    def collect(
        self,
        group: dict[str, Any],
        order: StateOrder,
        values: list[Any],
        twins: dict[int, Tensor],
        use_model_grads: bool,
        is_same_state: bool,
        is_only_group: bool,
    ) -> list[Launch]:
        """The launches of one step.

        Args:
            group: a parameter group.
            order, values: of the optimizer's state; see :meth:`Entries.of`.
            twins: the model's 16-bit parameter, by ``id`` of its float32 master.
            use_model_grads: take the gradients of those, not of the masters.
            is_same_state: the state has the same order as in the last step.
            is_only_group: the optimizer has no other.
        """
        params = group["params"]
        lists = _with_twins(params, twins, use_model_grads)
        is_same = len(self._lists) == len(lists) and all(map(_is_same, lists, self._lists))
        if self._entries is None or not (is_same and is_same_state):
            self._entries = order.entries(params)
        _, sources, copies = lists if twins else (params, params, [None] * len(params))
        grads = list(map(_grad_of, sources))
        has_momentum = group["momentum"] != 0
        buffers = _buffers(self._entries.of(values)) if has_momentum else [None] * len(params)
        presence = (
            has_momentum,
            list(map(operator.is_, grads, itertools.repeat(None))),
            list(map(operator.is_, buffers, itertools.repeat(None))),
        )
        is_new = not is_same or presence != self._presence
        if not is_new and not (is_only_group and len(self._divisions) == 1):
            is_new = self._memory != memory_of(params)
        if is_new:
            self._divide((params, sources, copies), presence)
            self._lists = tuple(map(list, lists))
        lists = (params, sources, copies, grads, buffers)
        return [
            _launch(self._optimizer, group, lists, division, is_new) for division in self._divisions
        ]

    def _divide(self, lists: tuple[Sequence[Tensor], ...], presence: tuple[Any, ...]) -> None:
        has_momentum, without_grad, without_buffer = presence
        chosen: dict[tuple, list[int]] = {}
        for i, (param, source, copy) in enumerate(zip(*lists, strict=True)):
            if without_grad[i]:
                continue
            copy_dtype = None if copy is None else copy.dtype
            is_first_run = has_momentum and without_buffer[i]
            kind = (param.device, param.dtype, placement_of(source), source.dtype, copy_dtype)
            key = (*kind, is_first_run)
            chosen.setdefault(key, []).append(i)
        self._divisions = [
            _Division(indices, key[-1], self._holder([lists[0][i] for i in indices]))
            for key, indices in chosen.items()
        ]
        self._presence = presence
        self._memory = memory_of(lists[0])

    def _holder(self, params: list[Tensor]) -> Holder | None:
        return None if self._held_ops is None else Holder(self._held_ops, params)


@dataclasses.dataclass
class _Division:
    """Parameters of a group that one launch can update."""

    indices: list[int]
    is_first_run: bool
    holder: Holder | None
    known: list[weakref.ref[Tensor]] = dataclasses.field(default_factory=list)


def _with_twins(
    params: list[Tensor], twins: dict[int, Tensor], use_model_grads: bool
) -> tuple[Sequence[Tensor | None], ...]:
    """Parameters; with twins also whose gradients are used, and the twins, None where missing."""
    if not twins:
        return (params,)
    copies = [twins.get(id(p)) for p in params]
    sources = params
    if use_model_grads:
        sources = [p if c is None else c for p, c in zip(params, copies, strict=True)]
    return params, sources, copies


def _buffers(entries: list[dict | None]) -> list[Tensor | None]:
    try:
        return list(map(_buffer_of, entries))
    except (KeyError, TypeError):  # some have none yet
        return [None if entry is None else entry.get(BUFFER) for entry in entries]


def _is_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def buffer_like(param: Tensor, buffer: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The buffer in this dtype and its parameter's device and layout; a new one is not written."""
    if buffer is None:
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    if (buffer.dtype, buffer.device, buffer.stride()) == (dtype, param.device, param.stride()):
        return buffer
    return torch.empty_like(param, dtype=dtype, requires_grad=False).copy_(buffer)


def _launch(
    optimizer: str,
    group: dict[str, Any],
    lists: tuple[list, ...],
    division: _Division,
    is_new: bool,
) -> Launch:
    if len(division.indices) < len(lists[0]):
        lists = tuple([one[i] for i in division.indices] for one in lists)
    params, sources, copies, grads, buffers = lists
    if copies[0] is None:
        copies = []
    if group["momentum"] == 0:
        buffers = []
    return Launch(
        optimizer,
        group,
        params,
        sources,
        copies,
        grads,
        buffers,
        division.is_first_run,
        is_new,
        division.holder,
        division.known,
    )
