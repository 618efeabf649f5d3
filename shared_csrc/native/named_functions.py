"""The classes that are autograd functions in Apex: see :class:`NamedFunction`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from .gradients import as_tuple

__all__ = ["NamedFunction"]


class _Traced(type(Function)):  # type: ignore[misc]
    """What a class needs for torch's compiler to trace its own ``apply``.

    The compiler takes classes of exactly Function's metaclass for autograd functions. It would
    trace their ``forward`` and ``backward``, and never see an ``apply``.
    """

    def __init__(cls, name: str, bases: Any, namespace: Any, **_: Any) -> None:
        super().__init__(name, bases, namespace)


def _apply_of_function(cls: Any, *arguments: Any, **options: Any) -> Any:
    return super(NamedFunction, cls).apply(*arguments, **options)


class NamedFunction(Function, metaclass=_Traced):
    """An autograd function of Apex, whose ``apply`` is another function of ours.

    A subclass defines ``apply``, a static method with the arguments of Apex's ``forward``. So it
    has whatever our function has: derivatives of every order, ``torch.func``, compiled code.
    ``forward(ctx, ...)`` and ``backward(ctx, ...)`` follow from it; another autograd function may
    call them in its own. A class that a user derives with methods of its own is an ordinary one.

    Args:
        constants: names of the arguments that get no gradient although they are floating-point
            tensors. ``backward`` gives one to all others, even where the function that calls
            ``forward`` has cast them, and they do not say any more that they want one.
    """

    def __init_subclass__(cls, constants: Sequence[str] = (), **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        if "apply" in own:
            cls.forward = staticmethod(_recorded(cls.apply, constants))  # type: ignore[assignment]
        elif "forward" in own or "backward" in own:
            cls.apply = classmethod(_apply_of_function)  # type: ignore[assignment,attr-defined]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the arguments of ``forward``; None for those that have none."""
        count, positions, inputs, outputs = ctx.recorded
        answer: list[Tensor | None] = [None] * count
        asked = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if output is not None and gradient is not None
        ]
        if asked and inputs:
            found = torch.autograd.grad(
                [output for output, _ in asked],
                inputs,
                [gradient for _, gradient in asked],
                retain_graph=torch._C._autograd._get_current_graph_task_keep_graph(),
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
            for position, gradient in zip(positions, found, strict=True):
                answer[position] = gradient
        return tuple(answer)


def _recorded(function: Callable[..., Any], constants: Sequence[str]) -> Callable[..., Any]:
    """``forward(ctx, ...)`` of a function; ``ctx`` keeps what ``backward`` needs."""
    signature = inspect.signature(function)
    names = list(signature.parameters)
    constant = frozenset(names.index(name) for name in constants)

    def forward(ctx: Any, *arguments: Any, **options: Any) -> Any:
        """Call ``apply``, and keep on ``ctx``, if there is one, what ``backward`` needs."""
        if ctx is None:
            return function(*arguments, **options)
        record = _record
        if torch.compiler.is_compiling():  # parts of it, compiled, would lose each other's graph
            record = torch.compiler.disable(record)
        return record(ctx, function, constant, arguments, options)

    ctx = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[ctx, *signature.parameters.values()]
    )
    return forward


def _record(
    ctx: Any,
    function: Callable[..., Any],
    constant: frozenset[int],
    arguments: Sequence[Any],
    options: dict[str, Any],
) -> Any:
    """Call a function, and set ``ctx.recorded`` for :meth:`NamedFunction.backward`."""
    given, positions = list(arguments), []
    with torch.enable_grad():
        for i, argument in enumerate(arguments):
            if i in constant or not isinstance(argument, Tensor) or not _is_floating(argument):
                continue
            if argument.requires_grad:
                # An alias: hooks on the argument itself run in the caller's backward alone.
                given[i] = argument.view_as(argument)
            else:
                given[i] = argument.detach().requires_grad_()
            positions.append(i)
        results = function(*given, **options)
    edges = [
        get_gradient_edge(result) if isinstance(result, Tensor) and result.requires_grad else None
        for result in as_tuple(results)
    ]
    ctx.recorded = len(given), positions, [given[i] for i in positions], edges
    if isinstance(results, Tensor):
        return results.detach()
    return tuple(r.detach() if isinstance(r, Tensor) else r for r in results)


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
