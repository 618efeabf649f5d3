"""What every class that is an autograd function in Apex must answer: see :func:`check_named`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_SEED = 3  # what dropout draws from


def wrapped(named: Any) -> type[torch.autograd.Function]:
    """An autograd function that calls ``forward`` and ``backward`` of another, as DLRM's does."""

    class Wrapped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            return named.forward(ctx, *arguments)

        @staticmethod
        def backward(ctx, *gradients):
            return named.backward(ctx, *gradients)

    return Wrapped


def check_named(
    named: Any,
    signature: str,
    arguments: Callable[[], tuple],
    grads: tuple[int, ...],
    compiles: bool = True,
) -> None:
    """Raise AssertionError unless a class can be used as the autograd function it is in Apex.

    Args:
        named: the class.
        signature: the arguments of Apex's ``forward`` behind ``ctx``, from the specification.
        arguments: makes them, float32 or float64.
        grads: positions of those that have gradients.
        compiles: whether ``apply`` compiles in one graph.
    """
    assert issubclass(named, torch.autograd.Function)
    of_forward = [parameter.name for parameter in _parameters(named.forward)]
    expected = signature.replace("*", "").split(", ")
    assert of_forward[: 1 + len(expected)] == ["ctx", *expected], of_forward

    given = list(arguments())
    seeds = _seeds(_called(named.apply, given))
    expected = _with_gradients(named.apply, given, grads, seeds)
    assert all(gradient is not None for gradient in expected[1]), expected[1]
    _assert_alike(_with_gradients(wrapped(named).apply, given, grads, seeds), expected)
    if type(named) is not type(torch.autograd.Function):  # whose ctx must be torch's own
        _check_unmarked(named, given, grads, seeds, expected)
    if compiles:
        torch.compiler.reset()
        compiled = torch.compile(lambda *a: named.apply(*a), backend="eager", fullgraph=True)
        _assert_alike(_with_gradients(compiled, given, grads, seeds), expected)


def _parameters(function: Callable) -> list[inspect.Parameter]:
    specification = inspect.getfullargspec(function)  # what Megatron asks
    parameters = list(inspect.signature(function).parameters.values())
    assert [p.name for p in parameters][: len(specification.args)] == specification.args
    return parameters


def _called(function: Callable, given: list) -> tuple[Tensor, ...]:
    torch.manual_seed(_SEED)
    copies = [a.clone() if isinstance(a, Tensor) else a for a in given]  # running statistics
    results = function(*copies)
    return results if isinstance(results, tuple) else (results,)


def _seeds(results: tuple) -> list[Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    return [torch.randn(r.shape, generator=generator).to(r.dtype) for r in results]


def _with_gradients(function: Callable, given: list, grads: tuple[int, ...], seeds: list) -> tuple:
    given = [a.clone() if isinstance(a, Tensor) else a for a in given]
    leaves = [given[i].requires_grad_() for i in grads]
    torch.manual_seed(_SEED)
    results = function(*given)
    results = results if isinstance(results, tuple) else (results,)
    gradients = torch.autograd.grad(results, leaves, seeds, allow_unused=True)
    return [r.detach() for r in results], list(gradients)


def _check_unmarked(named: Any, given: list, grads: tuple, seeds: list, expected: tuple) -> None:
    """Gradients also come where the caller's forward has lost the mark, as a cast in it does."""

    class Ctx:
        """What keeps attributes."""

    ctx = Ctx()
    results = _called(lambda *a: named.forward(ctx, *a), given)
    assert not any(r.requires_grad for r in results)
    with torch.no_grad():
        gradients = named.backward(ctx, *seeds)
    assert len(gradients) == len(given)
    _assert_alike((list(results), [gradients[i] for i in grads]), expected)
    assert all(g is None for i, g in enumerate(gradients) if not isinstance(given[i], Tensor))


def _assert_alike(actual: tuple, expected: tuple) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)
