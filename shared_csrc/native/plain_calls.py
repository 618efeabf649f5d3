"""The functions of plain calls, written out for a Formula: without loops, and a frame each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import is_grad_enabled
from torch.autograd import Function, forward_ad

from .gradients import places_of, required_gradients
from .plain import apply_of, direct


def plain_functions(
    formula: Any, function: type[Function], keeps_all: bool
) -> tuple[None, Callable[..., Any], Callable[..., Any]]:
    """The functions that serve calls of a formula, by what :func:`~.plain.plainness` answers.

    Args:
        formula: as ``gradients.function_of`` takes it.
        function: the autograd function of all other calls, which has the same context; its backward
            takes what is not plain.
        keeps_all: whether it keeps all tensors for the backward.
    """
    made: dict[str, Any] = {}
    exec(compile(_source(formula, keeps_all), f"<calls of {formula.name}>", "exec"), made)
    forward, backward, call = made["functions"](
        direct(formula.forward),
        direct(formula.backward),
        function.backward,
        formula.arrange,
        is_grad_enabled,
        forward_ad,
    )
    return None, call, apply_of(formula.name, forward, backward, function.backward)


# Setting ``to_save`` is what save_for_backward() does.
_SOURCE = """\
def functions(run_forward, run_backward, other_backward, arrange, is_grad_enabled, forward_ad):
    def forward(ctx, {parameters}):
        {results} = run_forward({arguments})
        ctx.to_save = ({kept})
        ctx.options = ({options})
        {unless_materialized}
        return {output}

    def backward(ctx, {gradients}):
        if is_grad_enabled() or forward_ad._current_level >= 0{or_missing}:
            return other_backward(ctx, {gradients})
        {kept} = ctx.saved_tensors
        ({options}) = ctx.options
        needs = ctx.needs_input_grad
        found = {found}
        return ({answer})

    def call({parameters}):
        {results} = run_forward({arguments})
        return {output}

    return forward, backward, call
"""


def _source(formula: Any, keeps_all: bool) -> str:
    """``_SOURCE`` for a formula: ``a`` are its arguments, ``r`` results, ``g`` gradients."""
    keeps, kept_results, picks = places_of(formula, keeps_all)
    required, materializes = required_gradients(formula)
    outputs, tensors, count = formula.outputs, formula.tensors, len(formula.names)
    a, g = [f"a{i}" for i in range(count)], [f"g{i}" for i in range(outputs)]
    r = [f"r{i}" for i in range(len(formula.results))]
    kept = [a[i] for i in keeps] + [r[i] for i in kept_results]
    wanted = " or ".join(f"needs[{i}]" for i in formula.grads if i in formula.shared)
    pool = [*kept, *a[tensors:], wanted or "False"]
    found = f"run_backward({', '.join(g + [pool[i] for i in picks])})"
    is_one = len(formula.backward._schema.returns) == 1
    found = f"({found},)" if is_one else found
    derivatives = {i: f"found[{k}] if needs[{i}] else None" for k, i in enumerate(formula.grads)}
    facts = "".join(f"({i}, {r[i]}.shape, {r[i]}.dtype), " for i in required)
    return _SOURCE.format(
        arguments=", ".join(a),
        parameters=", ".join(map(_parameter, a, formula.forward._schema.arguments)),
        results=r[0] if len(r) == 1 else ", ".join(r),
        kept="".join(f"{name}, " for name in kept),
        options="".join(f"{name}, " for name in a[tensors:]),
        unless_materialized=""
        if materializes
        else f"ctx.set_materialize_grads(False); ctx.required = ({facts})",
        output=r[0] if outputs == 1 else ", ".join(r[:outputs]),
        gradients=", ".join(g),
        or_missing="" if materializes else "".join(f" or g{i} is None" for i in required),
        found=found if formula.arrange is None else f"arrange(*{found})",
        answer="".join(f"{derivatives.get(i)}, " for i in range(count)),
    )


def _parameter(name: str, argument: Any) -> str:
    """As an operator's schema has it: calls may leave out what has a default."""
    return f"{name}={argument.default_value!r}" if argument.has_default_value() else name
