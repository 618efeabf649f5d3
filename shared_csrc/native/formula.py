"""What torch asks of an operator beyond its kernels, answered once: see :class:`Formula`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .transforms import differentiated_again, kernels_serve

__all__ = ["Formula"]


class Formula:
    """A function with a fused forward, a fused backward, and one formula in plain PyTorch.

    A call runs the kernels where they serve, and the formula where torch asks what kernels have no
    answer to: ``torch.func``, forward mode, tracers. Derivatives beyond the first are those of the
    formula. DTensors run shard by shard. ``vmap`` without gradients makes a batch of rows more
    rows.

    Args:
        name: what users call the function by; messages begin with it.
        forward: the raw operator, ``(tensors..., options...) -> (outputs..., statistics...)``.
        backward: the raw operator, ``(gradients of outputs..., *saves) -> gradients of grads``.
        reference: ``forward`` in plain PyTorch, with the same arguments and results.
        saves: names of arguments and results of ``forward`` that ``backward`` takes, in its order.
        grads: names of the arguments that have gradients, in the order of the backward's results.
        rows: name of each argument that is made of rows, and how many dimensions its row has. The
            dimensions before are those of every result, too.
        shared: names of the tensors that all rows share; their gradients are sums over rows.
        outputs: how many results are the user's; the others are statistics, without gradients.
    """

    def __init__(
        self,
        name: str,
        forward: Any,
        backward: Any,
        reference: Callable[..., Tensor | tuple[Tensor, ...]],
        *,
        saves: Sequence[str],
        grads: Sequence[str],
        rows: Mapping[str, int],
        shared: Sequence[str] = (),
        outputs: int = 1,
    ) -> None:
        self.name, self.reference, self.outputs = name, reference, outputs
        self.forward, self.backward = forward, backward
        arguments = forward._schema.arguments
        names = [argument.name for argument in arguments]
        results = [result.name for result in forward._schema.returns]
        self.tensors = sum("Tensor" in str(argument.type) for argument in arguments)
        self.grads = [names.index(name) for name in grads]
        self.rows = {names.index(name): dims for name, dims in rows.items()}
        self.shared = [names.index(name) for name in shared]
        # What the backward is given stands in (*tensors, *kept results, *options).
        self._kept = [results.index(name) for name in saves if name in results]
        pool = [*names[: self.tensors], *(results[i] for i in self._kept), *names[self.tensors :]]
        self._saves = [pool.index(name) for name in saves]
        self._function = _function_of(self)
        self._register_vmap()

    def __call__(self, *arguments: Any) -> Any:
        """Return the output, or a tuple of several."""
        if type(arguments[0]) is not Tensor and self._has_dtensors(arguments):
            from .shards import on_shards

            return on_shards(self, arguments)
        if not kernels_serve():
            return self.of_user(self.reference(*arguments))
        if torch.is_grad_enabled():
            for i in self.grads:
                if arguments[i] is not None and arguments[i].requires_grad:
                    return self._function.apply(*arguments)
        return self.of_user(self.forward(*arguments))

    def of_user(self, results: Any) -> Any:
        """The outputs among results."""
        if self.outputs > 1:
            return results[: self.outputs]
        return results if isinstance(results, Tensor) else results[0]

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """Both operators in ATen's, for ``ExportedProgram.run_decompositions``."""

        def backward(*given: Any) -> Any:
            gradients = given[: self.outputs]
            pool = dict(zip(self._saves, given[self.outputs :], strict=True))
            kept, defaults = len(self._kept), inspect.signature(self.reference).parameters.values()
            arguments = [
                pool.get(i if i < self.tensors else i + kept, parameter.default)
                for i, parameter in enumerate(defaults)
            ]
            results = _plain_gradients(
                self.reference, self.outputs, self.grads, gradients, arguments
            )
            return results[0] if len(results) == 1 else results

        return {self.forward: self.reference, self.backward: backward}

    def _register_vmap(self) -> None:
        """Samples are more rows; but sums over rows of a shared tensor's gradient are apart."""
        from .batching import register_vmap

        register_vmap(self.forward, self.rows)
        rows: dict[int, int | None] = {}
        if not self.shared:
            rows.update(dict.fromkeys(range(self.outputs)))
            for position, i in enumerate(self._saves, start=self.outputs):
                if i in self.rows or self.tensors <= i < self.tensors + len(self._kept):
                    rows[position] = self.rows.get(i)
        register_vmap(self.backward, rows)

    def _has_dtensors(self, arguments: tuple[Any, ...]) -> bool:
        """Whether a tensor is a DTensor; imports nothing: where there is one, it is imported."""
        module = sys.modules.get("torch.distributed.tensor")
        if module is None:
            return False
        return any(isinstance(a, module.DTensor) for a in arguments[: self.tensors])


def _as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


def _plain_gradients(
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
        return _as_tuple(reference(*given))[:outputs]

    values = [
        arguments[i].to(torch.promote_types(arguments[i].dtype, torch.float32)) for i in positions
    ]
    results, derivative = torch.func.vjp(of, *values)
    wanted = derivative(tuple(g.to(r.dtype) for g, r in zip(gradients, results, strict=True)))
    by_position = dict(zip(positions, wanted, strict=True))
    return tuple(
        None if arguments[i] is None else by_position[i].to(arguments[i].dtype) for i in grads
    )


def _function_of(formula: Formula) -> type[torch.autograd.Function]:
    """What eager and compiled code differentiate once. It runs at every step: count its calls.

    Its functions hold no Formula, which torch 2.10's compiler does not know.
    """
    fused_forward, fused_backward = formula.forward, formula.backward
    reference, outputs = formula.reference, formula.outputs
    tensors, grads, kept, saves = formula.tensors, formula.grads, formula._kept, formula._saves
    count = len(fused_forward._schema.arguments)
    returns_one = len(fused_forward._schema.returns) == 1

    def forward(ctx: Any, *arguments: Any) -> Any:
        results = fused_forward(*arguments)
        if kept:
            ctx.save_for_backward(*arguments[:tensors], *[results[i] for i in kept])
        else:
            ctx.save_for_backward(*arguments[:tensors])
        ctx.options = arguments[tensors:]
        if returns_one:
            return results
        return results[0] if outputs == 1 else results[:outputs]

    def backward(ctx: Any, *gradients: Tensor) -> Any:
        saved, options = ctx.saved_tensors, ctx.options
        if differentiated_again():
            given = (*saved[:tensors], *options)
            results = _plain_gradients(reference, outputs, grads, gradients, given)
        else:
            pool = saved + options
            results = fused_backward(*gradients, *[pool[i] for i in saves])
        answer = [None] * count
        for i, result in zip(grads, _as_tuple(results), strict=True):
            answer[i] = result
        return tuple(answer)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(formula.name, (torch.autograd.Function,), members)
