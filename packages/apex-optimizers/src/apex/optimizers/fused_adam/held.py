"""Lists that C++ keeps from step to step, so that only gradients are handed over at each.

Converting a list of tensors costs about 350 ns per tensor and step: more than updating 100 numbers.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .._ops import library

MIN_TENSORS = 32  # per list; of fewer, less than 10 us a step could be saved
MAX_MEAN_ELEMENTS = 4096  # of larger tensors less than a tenth of the time could be saved

_PLAIN = {Tensor, torch.nn.Parameter}
_NOT_TRACEABLE = (
    "apex_optimizers::{} works on tensors that only C++ knows, so it cannot be traced, and has no "
    "meaning for meta or fake tensors. Use adam_step, whose schema names all that it changes."
)


@library.define(
    "adam_hold(Tensor[] params, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] masters) -> int"
)
def adam_hold(
    params: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], masters: list[Tensor]
) -> int:
    """Keep handles on the tensors of four lists of :func:`adam_step`; return their number.

    The tensors live until :func:`adam_release`. Python's cycle collector does not see that, so that
    a tensor which leads back to who releases the lists would never be freed.
    """
    raise NotImplementedError(_NOT_TRACEABLE.format("adam_hold"))


@library.define("adam_release(Tensor like, int held) -> ()")
def adam_release(like: Tensor, held: int) -> None:
    """Let go of lists held for the device of ``like``; an unknown number is left alone."""
    raise NotImplementedError(_NOT_TRACEABLE.format("adam_release"))


@library.define("adam_held_count(Tensor like) -> int")
def adam_held_count(like: Tensor) -> int:
    """How many lots of lists are held for the kind of device of ``like``."""
    raise NotImplementedError(_NOT_TRACEABLE.format("adam_held_count"))


@library.define(
    "adam_step_held(int held, Tensor[] grads, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, int step, bool bias_correction, bool decoupled, "
    "bool maximize=False) -> ()"
)
def adam_step_held(
    held: int,
    grads: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    bias_correction: bool,
    decoupled: bool,
    maximize: bool = False,
) -> None:
    """:func:`adam_step` on held lists: same checks, errors and results.

    Pointers, sizes and dtypes are read anew in each call, so ``param.data = ...`` is noticed.

    Args:
        held: from :func:`adam_hold`; else RuntimeError.
    """
    raise NotImplementedError(_NOT_TRACEABLE.format("adam_step_held"))


class HeldLists:
    """Owner of one lot of held lists; they are released with it. Not to be copied or pickled."""

    def __init__(self, lists: tuple[list[Tensor], ...]) -> None:
        self.number: int = adam_hold(*lists)
        # The process ends without releasing: torch may be gone by then.
        weakref.finalize(self, _release, lists[0][0].new_empty(0), self.number).atexit = False


def _release(like: Tensor, number: int) -> None:
    # The cycle collector may call this amid someone's tracing, which this call is no part of.
    with _disable_current_modes():
        adam_release(like, number)


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
