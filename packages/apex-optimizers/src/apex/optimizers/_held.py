"""Lists that C++ keeps from step to step, so that only gradients are handed over at each.

Converting a list of tensors costs about 350 ns per tensor and step: more than updating 100 numbers.
"""

from __future__ import annotations

import gc
import operator
import re
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ._ops import library

MIN_TENSORS = 32  # per list; of fewer, less than 10 us a step could be saved
MAX_MEAN_ELEMENTS = 4096  # of larger tensors less than a tenth of the time could be saved

_PLAIN = {Tensor, torch.nn.Parameter}
_NOT_TRACEABLE = (
    "apex_optimizers::{} works on tensors that only C++ knows, so it cannot be traced, and has no "
    "meaning for meta or fake tensors. Use {}, whose schema names all that it changes."
)
_LIST = re.compile(r"Tensor(\(\w!\))?\[\] ")


class HeldOps:
    """The operators of one step operator on held lists; C++ for them is in the same folder.

    ``hold`` keeps handles on the tensors of all lists but ``grads``, and returns their number.
    They live until ``release``. Python's cycle collector does not see that, so that a tensor which
    leads back to who releases the lists would never be freed. ``step`` takes that number, the
    gradients, and what else the step operator takes: same checks, errors and results, and
    RuntimeError for another number. Pointers, sizes and dtypes are read anew in each call, so
    ``param.data = ...`` is noticed. ``count`` tells how many lots of lists are held.

    Args:
        plain: the step operator, called ``<name>_step``; the others are ``<name>_hold`` and so on.
        file: ``__file__`` of a module in the operator's folder.
    """

    def __init__(self, plain: Any, file: str) -> None:
        self.plain = plain
        self._file = file
        self._plain_name = plain.name().partition("::")[2]
        name = self._plain_name.removesuffix("_step")
        arguments = library.schemas[self._plain_name].partition("(")[2].rpartition(") ->")[0]
        lists = [_LIST.sub("Tensor[] ", a) for a in arguments.split(", ") if _LIST.match(a)]
        rest = [a for a in arguments.split(", ") if not _LIST.match(a)]
        lists.remove("Tensor[] grads")
        self.hold = self._define(f"{name}_hold", f"({', '.join(lists)}) -> int")
        self.release = self._define(f"{name}_release", "(Tensor like, int held) -> ()")
        self.count = self._define(f"{name}_held_count", "(Tensor like) -> int")
        taken = ", ".join(["int held", "Tensor[] grads", *rest])
        self.step = self._define(f"{name}_step_held", f"({taken}) -> ()")

    def _define(self, name: str, signature: str) -> Any:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(_NOT_TRACEABLE.format(name, self._plain_name))

        refuse.__doc__ = f"See :class:`apex.optimizers._held.HeldOps` of ``{self._plain_name}``."
        return library.define(name + signature, self._file)(refuse)


class HeldLists:
    """Owner of one lot of held lists; they are released with it. Not to be copied or pickled."""

    def __init__(self, ops: HeldOps, lists: tuple[list[Tensor], ...]) -> None:
        self.number: int = ops.hold(*lists)
        # The process ends without releasing: torch may be gone by then.
        finalizer = weakref.finalize(self, _release, ops, lists[0][0].new_empty(0), self.number)
        finalizer.atexit = False


class Holder:
    """Holds lists from the second step with the same tensors on, where that pays."""

    def __init__(self, ops: HeldOps, params: list[Tensor]) -> None:
        self._ops = ops
        self.may_hold = is_worth_holding(params)
        self._states: tuple[list[Tensor], ...] | None = None  # the last step's
        self._held: HeldLists | None = None  # params and _states

    @property
    def held(self) -> HeldLists | None:
        """What is held now."""
        return self._held

    def lists_of(
        self, params: list[Tensor], states: tuple[list[Tensor], ...], grads: list[Tensor]
    ) -> HeldLists | None:
        """What to call the step with, or None where the lists themselves are to be handed over.

        Args:
            params: the same in every call.
            states: the other lists, which may have changed.
            grads: of this step.
        """
        if not self.may_hold:
            return None
        if self._states is None or not _are_same(self._states, states):
            self._states, self._held = states, None
            return None
        if not is_eager(grads):
            return None
        if self._held is None:
            if not can_hold(params, states):
                self.may_hold, self._states = False, None
                return None
            self._held = HeldLists(self._ops, (params, *states))
        return self._held


def _are_same(kept: tuple[list[Tensor], ...], states: tuple[list[Tensor], ...]) -> bool:
    return kept is states or all(
        len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in zip(kept, states, strict=True)
    )


def _release(ops: HeldOps, like: Tensor, number: int) -> None:
    # The cycle collector may call this amid someone's tracing, which this call is no part of.
    with _disable_current_modes():
        ops.release(like, number)


def is_worth_holding(params: list[Tensor]) -> bool:
    """Whether there are many small tensors.

    A moment that somebody takes out of the state, to free its memory, lives until the next step
    if it is held; so large ones are not.
    """
    return (
        len(params) >= MIN_TENSORS
        and params[0].device.type in ("cpu", "cuda")
        and sum(param.numel() for param in params) <= MAX_MEAN_ELEMENTS * len(params)
    )


def can_hold(params: list[Tensor], states: Iterable[list[Tensor]]) -> bool:
    """Whether holding these tensors harms nobody.

    What C++ holds is beyond the cycle collector: an attribute or a hook of a parameter that refers
    to the optimizer would keep both for ever. (Torch itself never frees such cycles through hooks
    of accumulation.) And ``torch.utils.swap_tensors``, by which modules convert parameters if so
    told, refuses tensors with a second owner.
    """
    return (
        not torch.__future__.get_swap_module_params_on_conversion()
        and all(_PLAIN.issuperset(map(type, tensors)) for tensors in (params, *states))
        and not any(map(_may_refer, params))
    )


def _may_refer(param: Tensor) -> bool:
    # Unpickled parameters have an empty dict of hooks, others None.
    return bool(param._backward_hooks) or any(map(gc.is_tracked, vars(param).values()))


def is_eager(grads: list[Tensor]) -> bool:
    """Whether nothing traces or transforms this call, which would miss the tensors in C++."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and _PLAIN.issuperset(map(type, grads))
    )
