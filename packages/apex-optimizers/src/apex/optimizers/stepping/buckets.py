"""Buckets: the parameters of a group that one launch can update."""

from __future__ import annotations

import dataclasses
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .._shared.native.writes import below_autograd
from .gradients import check_gradients, forms_of, match_layouts, write_back
from .held_lists import HeldOps, Holder
from .masters import MasterMarks
from .real_views import is_lazy, real_gradients, real_views
from .sharding import is_sharded, local_tensors
from .state_order import are_same

MASTER = "master_param"

_step_of = operator.itemgetter("step")
_dtype_of = operator.attrgetter("dtype")
_PLAIN = {Tensor, torch.nn.Parameter}
_Lists = tuple[list[Tensor], ...]


# Pickles of FusedAdam name StateLayout, by the place where it was before.
sys.modules["apex.optimizers._buckets"] = sys.modules[__name__]


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """What an optimizer keeps per parameter, and what its messages call it."""

    optimizer: str
    moments: tuple[str, ...]  # keys of tensors like the parameter, in the order of the operator
    has_masters: bool = False  # whether there may be float32 copies of 16-bit parameters
    counts_group_steps: bool = True  # whether the group holds "step"
    grad_name: str = "grad"  # the parameters' attribute that holds the gradient
    any_grad_dtype: bool = False  # whether gradients may differ in dtype from their parameter
    counts_steps: bool = True  # whether states hold "step"
    has_copies: bool = False  # whether 16-bit copies of float32 masters are written, too


_STATE_DTYPES = {
    dtype: torch.float32 if dtype.itemsize == 2 else dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
} | {dtype: dtype for dtype in (torch.complex64, torch.complex128)}


def state_dtype(param: Tensor) -> torch.dtype | None:
    """Dtype of the moments of a parameter; None if the parameter's dtype is not supported."""
    return _STATE_DTYPES.get(param.dtype)


class Outdated(RuntimeError):
    """Parameters or states were changed since their bucket was made: it is to be made anew."""


def ask(buckets: Sequence[Bucket], call: Callable[..., Any], *args: Any) -> Any:
    """``call(*args)``, which hands the lists of these buckets to operators; again after a repair.

    Operators look at all tensors before they write to any, and say no by an error. Here alone it is
    taken for an answer: to ask the same in Python first takes 10 to 17 % of a step of small
    tensors. (Operators that returned False instead were tried. They are as fast, but torch itself
    refuses sparse gradients by an error all the same.) What is wrong is found out from the tensors.
    Where an operator had no reason to refuse them, nothing is called again: it may have written.

    Raises:
        Outdated: parameters or states are not those for which a bucket was made.
        RuntimeError: a gradient cannot be used; or what ``call`` raised.
    """
    try:
        return call(*args)
    except RuntimeError:
        mended = [bucket.mend() for bucket in buckets]
        if not any(mended):
            raise
    return ask(buckets, call, *args)


class Members(NamedTuple):
    """Lists of one length, an element per parameter of a bucket."""

    params: list[Tensor]  # what is updated
    sources: list[Tensor]  # whose gradients are used: the parameters, or what they are masters of
    copies: list[Tensor]  # 16-bit parameters that are written, too; empty if there are none
    states: list[Any]


class Bucket:
    """Parameters of one group with one device, dtype and step count: one launch updates them.

    ``step`` in the state of all parameters is one shared tensor, so that counting a step is one
    operation, whatever the number of parameters. Gradients and states are those of the step that is
    being taken; between steps the bucket has none, so that they can be freed. But the lists of
    many small tensors stay in C++, if the operator can hold them. Operators are given complex
    tensors as real ones, which are never held: they are views.
    """

    writing_ops: ClassVar[tuple[Callable[..., None], ...]] = ()  # which write to gradients, too
    held_ops: ClassVar[HeldOps | None] = None  # of the operator that can hold its lists
    place: int | None = None  # of its first parameter in the optimizer, once it was asked for

    def __init__(
        self,
        layout: StateLayout,
        group: dict[str, Any],
        keys: tuple[str, ...],
        members: Members,
        count: int,
    ) -> None:
        self.layout = layout
        self.group = group
        self.keys = keys  # of the moments in states; the others are not used in this group
        self.params, self.sources, self.copies, self.states = members
        self._written = self.params + self.copies
        self.count = count  # steps that parameters had taken when the bucket was made
        self.grads: list[Tensor] = []
        # The same, or shards of them, real views, or copies in the parameters' layout.
        self.used: list[Tensor] = []
        self._given: list[Tensor] | None = None  # what was used before layouts were matched
        self._is_new = True  # whether it was made in this step
        self.lists: _Lists = ()  # one per moment, then that of masters or copies
        self.has_run = False  # whether this step has changed anything
        self.step_tensor: Tensor | None = self.states[0]["step"] if layout.counts_steps else None
        self.dtype = self.params[0].dtype  # of all of them
        self.is_sharded = is_sharded(self.params[0])
        self.is_complex = self.dtype.is_complex
        self.marks = MasterMarks()
        may_hold = self.held_ops and not self.is_complex
        self._holder = Holder(self.held_ops, self.params) if may_hold else None
        self._kept: _Lists | None = None  # lists of the last step, if they may be held
        self._memory: list[Any] = []
        self._source_forms: list[Any] = []
        self._state_addresses: list[list[int]] = []
        self._known_states: list[list[weakref.ref[Tensor]]] = []
        self._state_dtypes: list[torch.dtype | None] = []
        self._grad_dtypes: set[torch.dtype] = set()

    def take(self, grads: list[Tensor], states: list[Any]) -> bool:
        """Take over the gradients and states of a step; return whether states are this bucket's.

        They are not where somebody took out moments, or replaced what these states share.
        """
        self.grads, self.states, self.has_run = grads, states, False
        self.used, self._given, self._is_new = self._usable(grads), None, False
        try:
            self.lists = self.read_lists()
            return self.has_own_states()
        except (KeyError, TypeError):  # a moment is gone, or no tensor
            return False

    def drop(self) -> None:
        """Hold no gradient and no state any longer."""
        self.grads, self.used, self.states, self.lists = [], [], [], ()

    def has_own_states(self) -> bool:
        """Whether nobody has replaced what these states share."""
        shared = self.step_tensor
        return shared is None or all(map(operator.is_, map(_step_of, self.states), repeat(shared)))

    @property
    def step_number(self) -> int:
        return int(self.step_tensor)

    def set_step(self, step: int) -> None:
        self.step_tensor.fill_(step)

    @property
    def has_masters(self) -> bool:
        return self.layout.has_masters and MASTER in self.states[0]

    def check_new_gradients(self) -> None:
        """Raise if a gradient cannot be used; the parameters are as remembered."""
        where, any_dtype = f"{self.layout.optimizer}.step", self.layout.any_grad_dtype
        check_gradients(where, self.sources, self.grads, any_dtype, self._source_forms)

    def remember(self) -> None:
        """Note what was made and checked now, for :meth:`is_as_remembered`."""
        self._is_new = True
        self._memory = _memory_of(self._written)
        is_own = self.sources is self.params
        self._source_forms = self._memory[-1] if is_own else forms_of(self.sources)
        self._state_addresses = list(map(_addresses_of, self.lists))
        self._known_states = [list(map(weakref.ref, own)) for own in self.lists]
        self._state_dtypes = [own[0].dtype if own else None for own in self.lists]
        self._grad_dtypes = set(map(_dtype_of, self.grads))

    def is_as_remembered(self) -> bool:
        """Whether parameters and states are the same tensors still, in the same memory."""
        if self._memory != _memory_of(self._written):
            return False
        if self._has_other_grad_dtypes():
            return False
        return (
            len(self.lists) == len(self._known_states)
            and all(map(_refer_to, self._known_states, self.lists))
            and self._state_addresses == list(map(_addresses_of, self.lists))
        )

    def _has_other_grad_dtypes(self) -> bool:
        return self.layout.any_grad_dtype and self._grad_dtypes != set(map(_dtype_of, self.grads))

    def read_lists(self) -> _Lists:
        """The lists of states; raises KeyError or TypeError where they lack what they held."""
        if self._kept is not None and self._still_has(self._kept):
            return self._kept
        lists = [
            list(map(operator.itemgetter(key), self.states)) if key in self.keys else []
            for key in self.layout.moments
        ]
        if self.layout.has_masters:
            lists.append([state[MASTER] for state in self.states] if self.has_masters else [])
        elif self.layout.has_copies:
            lists.append(self.copies)
        if not all(map(_are_tensors, lists)):
            raise TypeError("None, say, is torch's word for a buffer that is missing")
        self._kept = tuple(lists) if self._holder and self._holder.may_hold else None
        return tuple(lists) if self._kept is None else self._kept

    def _still_has(self, lists: _Lists) -> bool:
        """Whether the state of all parameters still consists of these very tensors."""
        keys = self.layout.moments
        if self.layout.has_masters:
            keys = (*keys, MASTER)
            if self.has_masters != bool(lists[-1]):
                return False
        for key, own in zip(keys, lists, strict=False):  # copies have no key
            if own and not all(map(operator.is_, map(operator.itemgetter(key), self.states), own)):
                return False
        return True

    def run(self, op: Callable[..., None], *hyper: Any) -> None:
        """Call a step operator on the lists and ``hyper``; see :func:`ask`."""
        ask([self], self._call, op, hyper)
        if op in self.writing_ops:
            self._write_back()
        self.has_run = True
        # Autograd then notices a backward pass over values from before the step.
        torch.autograd.graph.increment_version(self._written)
        if self.has_masters:
            self.marks.count()

    def _write_back(self) -> None:
        """Give gradients, of which copies were used, what was written to these."""
        if self._given is not None:
            for own, copy in zip(self._given, self.used, strict=True):
                if own is not copy:
                    write_back(own, copy)
        if self.is_complex:
            used = self.used if self._given is None else self._given
            for grad, own in zip(local_tensors(self.grads), used, strict=True):
                if is_lazy(grad):
                    write_back(grad, torch.view_as_complex(own))

    def _call(self, op: Callable[..., None], hyper: tuple) -> None:
        if self.has_masters:
            self._refill_masters()
        with below_autograd():
            may_hold = self._holder and op is self.held_ops.plain
            if may_hold and self._holder.lists_of(self.params, self.lists, self.used):
                self._holder.step(self.used, *hyper)
            else:
                params, *lists = map(self.local, (self.params, *self.lists))
                op(params, self.used, *lists, *hyper)

    def _refill_masters(self) -> None:
        """Bring masters up to date with parameters that were changed, or were never seen."""
        params, masters = self.local(self.params), self.local(self.lists[-1])
        if masters[0].dtype == torch.int16:
            return  # a remainder is part of the parameter itself
        for index in self.marks.changed(self.params, params):
            param, whole = params[index], self.whole_master(index, masters[index])
            is_rounded = whole.to(param.device, param.dtype) == param
            value = torch.where(is_rounded, whole.to(param.device), param)
            self.set_master(index, masters[index], value)

    def whole_master(self, index: int, master: Tensor) -> Tensor:
        """The float32 master of a parameter, by its number, as it is kept."""
        return master

    def set_master(self, index: int, master: Tensor, value: Tensor) -> None:
        """Give a master, as it is kept, another value."""
        master.copy_(value)

    def mend(self) -> bool:
        """After a refusal: :meth:`match`.

        Raises:
            Outdated: an operator cannot walk the memory of parameters and states any longer.
            RuntimeError: a gradient cannot be used.
        """
        self.check_new_gradients()
        if self._given is None and self.match():
            return True
        if not (self._is_new or self._can_be_walked()):
            raise Outdated(f"{self.layout.optimizer}.step: parameters changed during the step.")
        return False

    def _can_be_walked(self) -> bool:
        """Whether parameters and states have memory, of the layouts that it had at first."""
        memory = _memory_of(self._written)
        if self._memory[1:] != memory[1:] or self._has_other_grad_dtypes():
            return False
        count = len(self.params)
        strides, forms = (own[:count] for own in memory[1:])
        for own, dtype in zip(self.lists, self._state_dtypes, strict=True):
            wanted = [(shape, dtype, *rest) for shape, _, *rest in forms]
            if own and (forms_of(own), list(map(Tensor.stride, own))) != (wanted, strides):
                return False
        lists = (self._written, *self.lists)
        return all(t.data_ptr() or not t.numel() for own in lists for t in own)

    def match(self) -> bool:
        """Let ``used`` be laid out as the parameters are; return whether it was not."""
        self._given, self.used = self.used, match_layouts(self.local(self.sources), self.used)
        return any(map(operator.is_not, self._given, self.used))

    def local(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors, or of DTensors the shards of this process; complex ones as real views."""
        tensors = local_tensors(tensors) if self.is_sharded else tensors
        return real_views(tensors) if self.is_complex else tensors

    def _usable(self, grads: list[Tensor]) -> list[Tensor]:
        """:meth:`local` of gradients, some of which the operator may refuse."""
        grads = local_tensors(grads) if self.is_sharded else grads
        return real_gradients(grads) if self.is_complex else grads


def _are_tensors(values: list[Any]) -> bool:
    return _PLAIN.issuperset(map(type, values)) or all(isinstance(v, Tensor) for v in values)


def _memory_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Addresses, strides and dtypes of tensors; equal lists mean that no tensor got other memory.

    Addresses are not enough: a view with another dtype or other strides may have the same one, and
    all empty tensors have the address 0.
    """
    return [
        _addresses_of(tensors),
        list(map(Tensor.stride, tensors)),
        forms_of(tensors),
    ]


def _addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _refer_to(references: Sequence[weakref.ref[Tensor]], tensors: Sequence[Tensor]) -> bool:
    """Whether weak references are to these very tensors."""
    return are_same([reference() for reference in references], tensors)
