"""The plain case of a call, asked for once: nothing stands between its tensors and the kernels.

On a small tensor kernels are done before Python is. A plain call therefore runs functions that are
written out for its Formula (``plain_calls.py``). All other calls take the way of ``formula.py``,
which serves them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, is_grad_enabled
from torch._C import _get_tracing_state, _is_any_autocast_enabled, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack, unwrap_if_dead
from torch.autograd import Function, forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

# What plainness() answers. The first is false.
NOT_PLAIN, WITHOUT_GRADIENT, WITH_GRADIENT = 0, 1, 2


def plainness(*tensors: Any) -> int:
    """Whether a call with these tensors, or None, is plain, and whether it wants a gradient.

    It is plain where all are plain tensors or parameters, and no transform of ``torch.func``,
    tracer, compiler, forward mode, dispatch mode or autocast is around. Compilers are told first:
    they would trace into the other questions.
    """
    if (
        is_dynamo_compiling()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _get_tracing_state() is not None
        or _is_any_autocast_enabled()
        or _len_torch_dispatch_stack()
    ):
        return NOT_PLAIN
    answer = WITHOUT_GRADIENT
    for tensor in tensors:
        kind = type(tensor)
        if kind is Tensor:
            if unwrap_if_dead(tensor) is not tensor:  # left over from a transform
                return NOT_PLAIN
        elif kind is not Parameter:
            if tensor is None:
                continue
            return NOT_PLAIN
        if tensor.requires_grad:
            answer = WITH_GRADIENT
    return answer if answer == WITHOUT_GRADIENT or is_grad_enabled() else WITHOUT_GRADIENT


def explain(check: Callable[..., Any], *arguments: Any) -> NoReturn:
    """Within ``except``: raise what ``check`` says of a plain call's arguments, else the error.

    If the check is silent, a hook on saved tensors has failed, memory is full, or a kernel was not
    built. Nothing may run again: the error might not come a second time.
    """
    try:
        check(*arguments)
    except Exception as said:
        raise said from None
    raise  # by no name: the error would hold its own frames, and their tensors


def direct(overload: Any) -> Callable[..., Any]:
    """What ``overload.__call__`` calls, without its frame."""
    return getattr(overload, "_op", overload)


def apply_of(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], general: Any
) -> Callable[..., Any]:
    """``apply`` of a new autograd function, for plain calls.

    They are under no transform, which ``Function.apply`` would ask. Autograd's engine enters
    ``backward`` itself, without two frames of torch's. Compilers read the class instead, and find
    ``general``: the backward of all calls, to which ``backward`` leaves what is not plain.
    """
    statics = {"forward": staticmethod(forward), "backward": staticmethod(general)}
    function: Any = type(name, (Function,), statics)
    function._backward_cls.apply = backward
    return super(Function, function).apply
