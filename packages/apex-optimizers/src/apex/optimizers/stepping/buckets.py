"""Buckets: the parameters of a group that one launch can update."""

from __future__ import annotations

import dataclasses
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from .._shared.native.writes import below_autograd
from .gradients import check_dense, check_gradients, forms_of, match_layouts, write_back
from .masters import MasterMarks
from .sharding import is_sharded, local_tensors

MASTER = "master_param"

_step_of = operator.itemgetter("step")
_dtype_of = operator.attrgetter("dtype")


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
    operation, whatever the number of parameters. Gradients and states are those of the step that is
    being taken; between steps the bucket has none, so that they can be freed.
    """

    writing_ops: tuple[Callable[..., None], ...] = ()  # which write to gradients, too

    def __init__(
        self, layout: StateLayout, group: dict[str, Any], params: list[Tensor], states: list[dict]
    ) -> None:
        self.layout = layout
        self.group = group
        self.params = params
        self.states = states
        self.grads: list[Tensor] = []
        self.has_run = False  # whether this step has changed anything
        self.step_tensor: Tensor = states[0]["step"]
        self.dtype = params[0].dtype  # of all of them
        self.is_sharded = is_sharded(params[0])
        self.marks = MasterMarks()
        self._memory: list[Any] = []
        self._state_addresses: list[list[int]] = []
        self._known_states: list[list[weakref.ref[Tensor]]] = []
        self._grad_dtypes: set[torch.dtype] = set()

    def has_own_states(self) -> bool:
        """Whether nobody has replaced what these states share."""
        try:
            return all(map(operator.is_, map(_step_of, self.states), repeat(self.step_tensor)))
        except (KeyError, TypeError):  # cleared, or no states at all
            return False

    @property
    def step_number(self) -> int:
        return int(self.step_tensor)

    def set_step(self, step: int) -> None:
        self.step_tensor.fill_(step)

    @property
    def has_masters(self) -> bool:
        return MASTER in self.states[0]

    def check(self) -> None:
        """Raise if a gradient or a parameter cannot be used, before anything is changed."""
        check_step(self.layout, self.params, self.grads)

    def check_new_gradients(self) -> None:
        """Raise if a gradient cannot be used; the parameters are as :meth:`remember` left them."""
        where, any_dtype = f"{self.layout.optimizer}.step", self.layout.any_grad_dtype
        check_gradients(where, self.params, self.grads, any_dtype, self._memory[-1])

    def remember(self) -> None:
        """Note what is checked now, for :meth:`is_as_remembered`."""
        states = self.state_lists()
        self._memory = memory_of(self.params)
        self._state_addresses = list(map(_addresses_of, states))
        self._known_states = [list(map(weakref.ref, own)) for own in states]
        self._grad_dtypes = set(map(_dtype_of, self.grads))

    def is_as_remembered(self) -> bool:
        """Whether parameters and states are the same tensors still, in the same memory."""
        if self._memory != memory_of(self.params):
            return False
        if self.layout.any_grad_dtype and set(map(_dtype_of, self.grads)) != self._grad_dtypes:
            return False
        states = self.state_lists()
        return (
            len(states) == len(self._known_states)
            and all(map(refer_to, self._known_states, states))
            and self._state_addresses == list(map(_addresses_of, states))
        )

    def state_lists(self) -> tuple[list[Tensor], ...]:
        """One list per moment, then that of the masters, which is empty if there are none."""
        lists = [[state[key] for state in self.states] for key in self.layout.moments]
        if self.layout.has_masters:
            lists.append([state[MASTER] for state in self.states] if self.has_masters else [])
        return tuple(lists)

    def run(self, op: Callable[..., None], *hyper: Any) -> None:
        """Call a step operator on the lists; gradients of another layout are copied first."""
        if self.has_masters:
            masters = self.local([state[MASTER] for state in self.states])
            self.marks.refill(self.params, self.local(self.params), masters)
        call, grads = self.bind(op, hyper), self.local(self.grads)
        used = call_matched(call, self.check, self.local(self.params), grads)
        if used is not grads and op in self.writing_ops:
            for own, copy in zip(grads, used, strict=True):
                if own is not copy:
                    write_back(own, copy)
        self.has_run = True
        # Autograd then notices a backward pass over values from before the step.
        torch.autograd.graph.increment_version(self.params)
        if self.has_masters:
            self.marks.count()

    def bind(self, op: Callable[..., None], hyper: tuple) -> Callable[[list[Tensor]], None]:
        """The operator as a function of the gradients alone."""
        params, *states = map(self.local, (self.params, *self.state_lists()))
        return lambda grads: op(params, grads, *states, *hyper)

    def dense_grads(self) -> list[Tensor]:
        """The gradients; one that a user set may have gaps or overlaps in memory, and is copied."""
        local = self.local(self.grads)
        if all(map(Tensor.is_contiguous, local)):
            return self.grads
        return [
            grad.contiguous()
            if own.layout == torch.strided and own.stride() != param.stride()
            else grad
            for grad, own, param in zip(self.grads, local, self.local(self.params), strict=True)
        ]

    def local(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors, or of DTensors the shards of this process."""
        return local_tensors(tensors) if self.is_sharded else tensors


def call_matched(
    call: Callable[[list[Tensor]], None],
    check: Callable[[], None],
    params: list[Tensor],
    grads: list[Tensor],
) -> list[Tensor]:
    """Call a step operator; return the gradients that it used, copies where layouts differed.

    The operator itself checks the memory layout of gradients before it writes. A check here would
    take a fifth of the time of a step of small tensors.

    Args:
        call: the operator, as a function of the gradients.
        check: raises if a gradient or a parameter cannot be used.
        params, grads: the shards of DTensors.
    """
    try:
        with below_autograd():
            call(grads)
        return grads
    except (RuntimeError, NotImplementedError):
        check()
        matched = match_layouts(params, grads)
        if all(map(operator.is_, matched, grads)):
            raise
    with below_autograd():
        call(matched)
    return matched


def memory_of(tensors: Sequence[Tensor]) -> list[Any]:
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


def refer_to(references: Sequence[weakref.ref[Tensor]], tensors: Sequence[Tensor]) -> bool:
    """Whether weak references are to these very tensors."""
    return len(references) == len(tensors) and all(
        map(operator.is_, map(weakref.ref.__call__, references), tensors)
    )


def check_step(layout: StateLayout, params: list[Tensor], grads: list[Tensor]) -> None:
    """Raise RuntimeError if a gradient or a parameter cannot be used."""
    where = f"{layout.optimizer}.step"
    check_gradients(where, params, grads, layout.any_grad_dtype)
    check_dense(where, params)
