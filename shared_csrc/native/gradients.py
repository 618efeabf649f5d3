"""The autograd functions of Formulas: fused gradients once, and plain ones beyond."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .transforms import differentiated_again


def function_of(formula: Any, again: Callable[..., Any] | None) -> type[Function]:
    """The autograd function for first derivatives, of all calls but plain ones.

    Its functions hold no Formula, because torch 2.10's compiler does not know that class. ``again``
    computes gradients that are differentiated again; if it is None, ``formula.reference`` does.
    """
    fused_forward, fused_backward = formula.forward, formula.backward
    reference, outputs, tensors = formula.reference, formula.outputs, formula.tensors
    grads, arrange, count = formula.grads, formula.arrange, len(formula.names)
    returns_one, shared = len(formula.results) == 1, [i for i in grads if i in formula.shared]
    keeps, kept, picks = places_of(formula, keeps_all=again is None)
    required, materializes = required_gradients(formula)
    asks = wanted_position(formula) is not None

    def forward(ctx: Any, *arguments: Any) -> Any:
        results = fused_forward(*arguments)
        made = [results] if returns_one else results
        ctx.save_for_backward(*[arguments[i] for i in keeps], *[made[i] for i in kept])
        ctx.options = arguments[tensors:]
        if not materializes:
            ctx.set_materialize_grads(False)
            ctx.required = [(i, results[i].shape, results[i].dtype) for i in required]
        return made[0] if outputs == 1 else results[:outputs]

    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        saved, options, needs = ctx.saved_tensors, ctx.options, ctx.needs_input_grad
        if not materializes:
            gradients = _with_zeros(gradients, ctx.required, saved)
        if (is_again := differentiated_again()) and again is None:
            given = (*saved[:tensors], *options)
            results = plain_gradients(reference, outputs, grads, gradients, given)
        else:
            wanted = (True in [needs[i] for i in shared],) if asks else ()
            values = saved + options + wanted
            given = (*gradients, *[values[i] for i in picks])
            results = again(*given) if is_again else fused_backward(*given)
            results = results if arrange is None else arrange(*results)
        results, answer = as_tuple(results), [None] * count
        for k, i in enumerate(grads):
            if needs[i]:
                answer[i] = results[k]
        return tuple(answer)

    statics = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(formula.name, (Function,), statics)


def places_of(formula: Any, keeps_all: bool) -> tuple[list[int], list[int], list[int]]:
    """Positions of the arguments that are kept, of the results that are kept,
    and of what the backward takes in ``(*kept arguments, *kept results, *options, answer)``, where
    the answer is that to :func:`wanted_position`.
    """
    names, results, tensors = formula.names, formula.results, formula.tensors
    keeps = [i for i in range(tensors) if keeps_all or names[i] in formula.saves]
    kept = [results.index(name) for name in formula.saves if name in results]
    pool = [*(names[i] for i in keeps), *(results[i] for i in kept), *names[tensors:]]
    picks = [pool.index(name) for name in formula.saves]
    if (position := wanted_position(formula)) is not None:
        picks.insert(position, len(pool))
    return keeps, kept, picks


def wanted_position(formula: Any) -> int | None:
    """Where the backward, behind the gradients, asks whether a gradient of ``shared`` is wanted.

    That is the argument that ``saves`` does not name; None if it names all.
    """
    takes = [argument.name for argument in formula.backward._schema.arguments[formula.outputs :]]
    if len(takes) == len(formula.saves):
        return None
    (position,) = (i for i, name in enumerate(takes) if name not in formula.saves)
    return position


def required_gradients(formula: Any) -> tuple[list[int], bool]:
    """Which gradients the backward requires, and whether all."""
    takes, outputs = formula.backward._schema.arguments, formula.outputs
    required = [i for i in range(outputs) if "Optional" not in str(takes[i].type)]
    return required, len(required) == outputs


def _with_zeros(
    gradients: Any, required: Sequence[tuple[int, Any, torch.dtype]], saved: Sequence[Any]
) -> list[Tensor | None]:
    """Zeros in the place of None, where the backward requires a gradient."""
    gradients, like = list(gradients), next(t for t in saved if t is not None)
    for i, shape, dtype in required:
        if gradients[i] is None:
            gradients[i] = like.new_zeros(shape, dtype=dtype)
    return gradients


def as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


def plain_gradients(
    reference: Callable[..., Any],
    outputs: int,
    grads: Sequence[int],
    gradients: Sequence[Tensor],
    arguments: Sequence[Any],
) -> tuple[Tensor | None, ...]:
    """Return what the backward does, differentiable any number of times.

    Computed from 16-bit arguments in float32, and rounded once at the end.
    """
    given = list(arguments)
    positions = [i for i in grads if given[i] is not None]

    def of(*values: Tensor) -> tuple[Tensor, ...]:
        for i, value in zip(positions, values, strict=True):
            given[i] = value
        return as_tuple(reference(*given))[:outputs]

    values = [
        arguments[i].to(torch.promote_types(arguments[i].dtype, torch.float32)) for i in positions
    ]
    results, derivative = torch.func.vjp(of, *values)
    pairs = zip(gradients, results, strict=True)
    wanted = derivative(
        tuple(torch.zeros_like(r) if g is None else g.to(r.dtype) for g, r in pairs)
    )
    by_position = dict(zip(positions, wanted, strict=True))
    return tuple(
        None if arguments[i] is None else by_position[i].to(arguments[i].dtype) for i in grads
    )


def refusing(name: str, backward: Any) -> Callable[..., Any]:
    """``backward``, whose results refuse to be differentiated."""

    def again(*given: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            gradients = as_tuple(backward(*given))
        tensors = [value for value in given if isinstance(value, Tensor)]
        return _NoSecondDerivative.apply(name, len(gradients), *gradients, *tensors)

    return again


class _NoSecondDerivative(Function):
    """Passes gradients through, and refuses to be differentiated.

    ``once_differentiable`` raises only if the gradient itself requires one; it would silently
    ignore a gradient penalty on ``y.sum()``.
    """

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"{ctx.name}: with memory_efficient=True the gradient cannot be differentiated again, "
            "because the input is not kept. Use memory_efficient=False where a second derivative "
            "is needed."
        )

    jvp = backward  # forward mode over a gradient
