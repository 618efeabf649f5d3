"""Buckets: the parameters of a group that one launch can update."""

from __future__ import annotations

import dataclasses
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import check_gradients, forms_of
from .held_lists import Holder, are_same, is_worth_holding
from .sharding import is_sharded, local_tensors
from .step import Step

MASTER = "master_param"

_step_of = operator.itemgetter("step")
_dtype_of = operator.attrgetter("dtype")
_version_of = operator.attrgetter("_version")
_PLAIN = {Tensor, torch.nn.Parameter}
_Lists = tuple[list[Tensor], ...]
Mark = tuple[int, int]  # a tensor's count of changes in place, and where its memory is
_UNKNOWN: Mark = (-1, -1)


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


def call_with_repair(buckets: Sequence[Bucket], call: Callable[..., Any], *args: Any) -> Any:
    """``call(*args)``, which hands the lists of these buckets to operators; again after a repair.

    Operators look at all tensors before they write to any, and say no by an error. Here alone it is
    taken for an answer: to ask the same in Python first takes 10 to 17 % of a step of small
    tensors. (Operators that returned False instead were tried. They are as fast, but torch itself
    refuses sparse gradients by an error all the same.) What is wrong is found out from the tensors.
    Where an operator had no reason to refuse them, nothing is called again: it may have written.

    Raises:
        RuntimeError: a gradient cannot be used; or what ``call`` raised.
    """
    for bucket in buckets:
        if bucket.pipeline is not None:
            bucket.pipeline.wait(bucket)
    try:
        return call(*args)
    except RuntimeError:
        mended = [bucket.mend() for bucket in buckets]
        if not any(mended):
            raise
    return call_with_repair(buckets, call, *args)


class MasterVersions:
    """The state in which a step left parameters that have masters.

    If a parameter was changed since, for instance by ``load_state_dict`` of its model or by
    ``clamp_``, its values replace the master's wherever they differ from the rounded master.
    Otherwise the next step would undo the change. ``param.data.clamp_()`` changes no count and is
    not noticed.
    """

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._addresses: list[int] = []

    def take(self, params: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """Remember how parameters are now.

        Args:
            shards: of DTensors, whose own addresses mean nothing; else the parameters again.
        """
        self._versions = list(map(_version_of, params))
        self._addresses = list(map(Tensor.data_ptr, shards))

    def count(self) -> None:
        """Count a change of the parameters that the optimizer made itself."""
        self._versions = [version + 1 for version in self._versions]

    def known(self, params: Iterable[Tensor]) -> dict[int, Mark]:
        """What is remembered, by ``id`` of the parameter."""
        marks = zip(self._versions, self._addresses, strict=True)
        return dict(zip(map(id, params), marks, strict=False))  # no mark where no master is

    def set_known(self, params: Iterable[Tensor], known: dict[int, Mark]) -> None:
        """Take over what others remembered."""
        marks = [known.get(id(param), _UNKNOWN) for param in params]
        self._versions, self._addresses = map(list, zip(*marks, strict=True))

    def changed(self, params: Sequence[Tensor], shards: Sequence[Tensor]) -> list[int]:
        """Numbers of the parameters that were changed since :meth:`take`, or were never seen."""
        versions, addresses = list(map(_version_of, params)), list(map(Tensor.data_ptr, shards))
        if versions == self._versions and addresses == self._addresses:
            return []
        before = zip(self._versions, self._addresses, strict=True)
        now = zip(versions, addresses, strict=True)
        return [i for i, (old, new) in enumerate(zip(before, now, strict=True)) if old != new]


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

    place: int | None = None  # of its first parameter in the optimizer, once it was asked for

    def __init__(
        self,
        optimizer: Any,
        group: dict[str, Any],
        keys: tuple[str, ...],
        members: Members,
        count: int,
    ) -> None:
        self.layout = layout = optimizer.layout
        self.pipeline = optimizer.pipeline  # of gradients that come from another device, or None
        self.step: Step = optimizer.op
        self.group = group
        self.keys = keys  # of the moments in states; the others are not used in this group
        self.params, self.sources, self.copies, self.states = members
        self._written = self.params + self.copies
        self.count = count  # steps that parameters have taken, where their states hold none
        self.grads: list[Tensor] = []
        # The same, or shards of them, real views, or copies in the parameters' layout.
        self.used: list[Tensor] = []
        self._given: list[Tensor] | None = None  # what was used before layouts were matched
        self.is_new = True  # whether it was made in this step
        self.lists: _Lists = ()  # one per moment, then that of masters or copies
        self.has_run = False  # whether this step has changed anything
        self.step_tensor: Tensor | None = self.states[0]["step"] if layout.counts_steps else None
        self.dtype = self.params[0].dtype  # of all of them
        self.is_sharded = is_sharded(self.params[0])
        self.is_complex = self.dtype.is_complex
        self._is_plain = not (self.is_sharded or self.is_complex)
        self.has_masters = layout.has_masters and MASTER in self.states[0]
        self.master_versions = MasterVersions()
        held = self.step.held
        may_hold = held and not self.is_complex and is_worth_holding(self.params)
        self._holder = Holder(held) if may_hold else None
        self._kept: _Lists = ()  # lists of the last step, if they may be held
        # How each of the lists is read from a state; None of those that are empty.
        self._readers = [operator.itemgetter(k) if k in keys else None for k in layout.moments]
        if layout.has_masters:
            self._readers.append(operator.itemgetter(MASTER) if self.has_masters else None)
        # What states share, by which it is known that nobody replaced it.
        self._shared: list[tuple[Callable[[Any], Any], Iterable[Any]]] = []
        if layout.counts_steps:
            self._shared.append((_step_of, repeat(self.step_tensor)))
        self._memory: list[Any] = []
        self._source_forms: list[Any] = []
        self._state_addresses: list[int] = []
        self._known_states: list[weakref.ref[Tensor]] = []
        self._state_dtypes: list[torch.dtype | None] = []
        self._grad_dtypes: set[torch.dtype] = set()

    def take(self, grads: list[Tensor], states: list[Any]) -> bool:
        """Take over the gradients and states of a step; return whether states are this bucket's.

        They are not where somebody took out moments, or replaced what these states share.
        """
        self.grads, self.states = grads, states
        self.used = grads if self._is_plain else self._usable(grads)
        self._given, self.is_new = None, False
        lists: list[list[Tensor]] = []
        try:
            for read in self._readers:
                lists.append([] if read is None else list(map(read, states)))
            for read, shared in self._shared:
                if not all(map(operator.is_, map(read, states), shared)):
                    return False
            if self.layout.has_masters and self.has_masters != (MASTER in states[0]):
                return False
        except (KeyError, TypeError):  # an entry is gone
            return False
        types = map(type, chain.from_iterable(lists))
        if not _PLAIN.issuperset(types) and not _are_tensors(lists):
            return False  # None, say, is torch's word for a buffer that is missing
        if self.layout.has_copies:
            lists.append(self.copies)
        self.lists = tuple(lists) if self._holder is None else self._kept_lists(tuple(lists))
        return True

    def _kept_lists(self, lists: _Lists) -> _Lists:
        """The lists of the last step, by which held ones are known, if these are the same."""
        if not (self._kept and all(map(are_same, self._kept, lists))):
            self._kept = lists
        return self._kept

    def check_new_gradients(self) -> None:
        """Raise if a gradient cannot be used; the parameters are as remembered."""
        where, any_dtype = f"{self.layout.optimizer}.step", self.layout.any_grad_dtype
        check_gradients(where, self.sources, self.grads, any_dtype, self._source_forms)

    def remember(self) -> None:
        """Note what was made and checked now, for :meth:`is_as_remembered`."""
        self.is_new = True
        self._memory = _memory_of(self._written)
        is_own = self.sources is self.params
        self._source_forms = self._memory[-1] if is_own else forms_of(self.sources)
        states = list(chain.from_iterable(self.lists))
        self._state_addresses = list(map(Tensor.data_ptr, states))
        self._known_states = list(map(weakref.ref, states))
        self._state_dtypes = [own[0].dtype if own else None for own in self.lists]
        self._grad_dtypes = set(map(_dtype_of, self.grads))

    def is_as_remembered(self) -> bool:
        """Whether parameters and states are the same tensors still, in the same memory."""
        if self._memory != _memory_of(self._written):
            return False
        if self.layout.any_grad_dtype and self._has_other_grad_dtypes():
            return False
        states = list(chain.from_iterable(self.lists))
        known = map(weakref.ref.__call__, self._known_states)
        return (
            len(states) == len(self._known_states)
            and all(map(operator.is_, known, states))
            and self._state_addresses == list(map(Tensor.data_ptr, states))
        )

    def _has_other_grad_dtypes(self) -> bool:
        return self._grad_dtypes != set(map(_dtype_of, self.grads))

    def run(self, values: Sequence[Any]) -> None:
        """Call the step operator on the lists and its numbers, as :func:`call_with_repair` does."""
        step = self.step
        if self.pipeline is not None:
            self.pipeline.wait(self)
        try:
            if self.has_masters:
                self._refill_masters()
            # Versions are raised below, for all lists at once.
            with torch._C._AutoDispatchBelowADInplaceOrView():
                may_hold = self._holder is not None and step.held is not None
                if may_hold and self._holder.lists_of(self.params, self.lists, self.used):
                    self._holder.step(self.used, *values)
                elif self._is_plain:
                    step.launch(self.params, self.used, *self.lists, *values)
                else:
                    params, *lists = map(self.local, (self.params, *self.lists))
                    step.launch(params, self.used, *lists, *values)
        except RuntimeError:
            if not self.mend():
                raise
            Bucket.run(self, values)
            return
        self.has_run = True
        if step.writes_gradients:
            self._write_back()
        # Autograd then notices a backward pass over values from before the step.
        torch.autograd.graph.increment_version(self._written)
        if self.has_masters:
            self.master_versions.count()
        if self.pipeline is not None:
            self.pipeline.send(self)

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

    def _refill_masters(self) -> None:
        """Bring masters up to date with parameters that were changed, or were never seen."""
        params, masters = self.local(self.params), self.local(self.lists[-1])
        if masters[0].dtype == torch.int16:
            return  # a remainder is part of the parameter itself
        changed = self.master_versions.changed(self.params, params)
        if not changed:
            return
        self.check_new_gradients()  # a step that is refused changes no master
        for index in changed:
            param, whole = params[index], self.whole_master(index, masters[index])
            is_rounded = whole.to(param.device, param.dtype) == param
            value = torch.where(is_rounded, whole.to(param.device), param)
            self.set_master(index, masters[index], value)
        self.master_versions.take(self.params, params)

    def whole_master(self, index: int, master: Tensor) -> Tensor:
        """The float32 master of a parameter, by its number, as it is kept."""
        return master

    def set_master(self, index: int, master: Tensor, value: Tensor) -> None:
        """Give a master, as it is kept, another value."""
        master.copy_(value)

    def mend(self) -> bool:
        """After a refusal: :meth:`match`.

        Raises:
            RuntimeError: a gradient cannot be used.
        """
        self.check_new_gradients()
        return self._given is None and self.match()

    def can_be_walked(self) -> bool:
        """Whether parameters and states have memory, of the layouts that it had at first."""
        memory = _memory_of(self._written)
        if self._memory[1:] != memory[1:]:
            return False
        if self.layout.any_grad_dtype and self._has_other_grad_dtypes():
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
        return list(map(torch.view_as_real, tensors)) if self.is_complex else tensors

    def _usable(self, grads: list[Tensor]) -> list[Tensor]:
        """:meth:`local` of gradients, some of which the operator may refuse."""
        grads = local_tensors(grads) if self.is_sharded else grads
        return real_gradients(grads) if self.is_complex else grads


def _are_tensors(lists: list[list[Any]]) -> bool:
    return all(isinstance(value, Tensor) for values in lists for value in values)


def _memory_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Addresses, strides and dtypes of tensors; equal lists mean that no tensor got other memory.

    Addresses are not enough: a view with another dtype or other strides may have the same one, and
    all empty tensors have the address 0.
    """
    addresses, strides = map(Tensor.data_ptr, tensors), map(Tensor.stride, tensors)
    return [list(addresses), list(strides), forms_of(tensors)]


def match_layouts(params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, copied where their memory is not laid out as their parameter's is.

    Autograd keeps both alike; gradients that a user or another library sets may differ. So may
    those that come through complex numbers: in memory they can be the negative of what they are.
    """
    return [
        grad
        if grad.stride() == param.stride() and not grad.is_neg()
        else torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        for param, grad in zip(params, grads, strict=True)
    ]


def write_back(grad: Tensor, copy: Tensor) -> None:
    """Give a gradient, whose elements may share memory with each other, the values of its copy."""
    for dimension, (size, stride) in enumerate(zip(grad.shape, grad.stride(), strict=True)):
        if size > 1 and stride == 0:  # expanded: these elements are one
            grad, copy = grad.narrow(dimension, 0, 1), copy.narrow(dimension, 0, 1)
    grad.copy_(copy)


def is_lazy(tensor: Tensor) -> bool:
    """Whether memory holds the conjugates, or the negative, of what a tensor means."""
    return tensor.is_conj() or tensor.is_neg()


def real_gradients(grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients as real tensors: views, or copies of those that :func:`is_lazy` is true of.

    Those that are not complex, or not strided, are returned as they are: operators refuse them.
    """
    return [
        torch.view_as_real(grad.resolve_conj().resolve_neg())
        if grad.is_complex() and grad.layout == torch.strided
        else grad
        for grad in grads
    ]
