"""Lists that C++ keeps from step to step: parameters, states, and gradients that stay the same.

Converting a list of tensors costs about 350 ns per tensor and step: more than updating 100 numbers.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .step import HeldOps

MIN_TENSORS = 32  # per list; of fewer, less than 10 us a step could be saved
MAX_MEAN_ELEMENTS = 4096  # of larger tensors less than a tenth of the time could be saved

_PLAIN = {Tensor, torch.nn.Parameter}


def are_same(a: Collection[Any], b: Collection[Any]) -> bool:
    """Whether both consist of the very same objects, in one order."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


class HeldLists:
    """Owner of one set of held lists, which are released with it. Do not copy or pickle it."""

    def __init__(self, ops: HeldOps, lists: list[list[Tensor]]) -> None:
        self.number: int = ops.hold(*lists)
        like = next(tensors[0] for tensors in lists if tensors).new_empty(0)
        # The process ends without releasing: torch may be gone by then.
        finalizer = weakref.finalize(self, _release, ops, like, self.number)
        finalizer.atexit = False


class KeptGradients:
    """Holds gradients, too, if every step has the same tensors.

    That is so if gradients are set to zero, or copied into, between steps. Gradients that are set
    to None must be freed at once, so they are not held. A weak reference tells the two cases apart.
    """

    def __init__(self, ops: HeldOps) -> None:
        self._ops = ops
        self._first: weakref.ref[Tensor] | None = None  # of the last step
        self._kept: list[Tensor] | None = None  # what is held
        self._held: HeldLists | None = None

    def number_of(self, grads: list[Tensor]) -> int:
        """The number under which these are held, or 0."""
        if self._held is not None and are_same(self._kept, grads):
            return self._held.number
        survived = self._first is not None and self._first() is grads[0]
        self._kept = self._held = None
        self._first = weakref.ref(grads[0])
        # Of a gradient with torch's negative bit, C++ would get a copy.
        if not survived or any(map(_may_refer, grads)) or any(map(Tensor.is_neg, grads)):
            return 0
        self._kept = list(grads)
        self._held = HeldLists(self._ops, [[], self._kept, *[[]] * (self._ops.lists - 2)])
        return self._held.number


class Holder:
    """Holds lists from the second step with the same tensors on, if that is faster."""

    def __init__(self, ops: HeldOps) -> None:
        self._ops = ops
        self._may_hold = True
        self._states: tuple[list[Tensor], ...] | None = None  # the last step's
        self.held: HeldLists | None = None  # params and _states
        self._gradients = KeptGradients(ops)

    def lists_of(
        self, params: list[Tensor], states: tuple[list[Tensor], ...], grads: list[Tensor]
    ) -> HeldLists | None:
        """What :meth:`step` will use, or None where the lists themselves are to be handed over.

        Args:
            params: the same in every call.
            states: the other lists; the same tuple while nobody has replaced a state.
            grads: of this step.
        """
        if not self._may_hold:
            return None
        if self._states is not states:
            self._states, self.held = states, None
            self._gradients = KeptGradients(self._ops)
            return None
        if not is_eager(grads):
            return None
        if self.held is None:
            if not can_hold(params, states):
                self._may_hold, self._states = False, None
                return None
            self.held = HeldLists(self._ops, [params, [], *states])
        return self.held

    def step(self, grads: list[Tensor], *rest: Any) -> None:
        """Call the step on what :meth:`lists_of` has just returned.

        Args:
            grads: of this step, perhaps copies in another layout.
            rest: what the step operator takes after its lists.
        """
        held_grads = self._gradients.number_of(grads)
        given = grads[:1] if held_grads else grads
        self._ops.step(self.held.number, held_grads, given, *rest)


def _release(ops: HeldOps, like: Tensor, number: int) -> None:
    # The cycle collector may call this while other code is traced: keep it out of that trace.
    with _disable_current_modes():
        ops.release(like, number)


def is_worth_holding(params: list[Tensor]) -> bool:
    """Whether there are many small tensors.

    If a user removes a held moment from the state, the next step frees its memory. Therefore large
    moments are not held.
    """
    return (
        len(params) >= MIN_TENSORS
        and params[0].device.type in ("cpu", "cuda")
        and sum(param.numel() for param in params) <= MAX_MEAN_ELEMENTS * len(params)
    )


def can_hold(params: list[Tensor], states: Iterable[list[Tensor]]) -> bool:
    """Whether these tensors can be held without side effects.

    The cycle collector does not see what C++ holds: if an attribute or a hook of a held parameter
    refers to the optimizer, neither is ever freed. (Torch itself never frees such cycles through
    hooks of accumulation.) And ``torch.utils.swap_tensors``, with which modules convert parameters
    if configured so, refuses tensors with a second owner.
    """
    return (
        not torch.__future__.get_swap_module_params_on_conversion()
        and all(_PLAIN.issuperset(map(type, tensors)) for tensors in (params, *states))
        and not any(map(_may_refer, params))
    )


def _may_refer(tensor: Tensor) -> bool:
    # Unpickled parameters have an empty dict of hooks, others None. What a graph refers to is not
    # known.
    return (
        bool(tensor._backward_hooks)
        or tensor.grad_fn is not None
        or any(map(gc.is_tracked, vars(tensor).values()))
    )


def is_eager(grads: list[Tensor]) -> bool:
    """Whether nothing traces or transforms this call, which would miss the tensors in C++."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and _PLAIN.issuperset(map(type, grads))
    )
