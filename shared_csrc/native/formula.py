"""What torch asks of an operator beyond its kernels, answered once: see :class:`Formula`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .batching import register_vmap
from .gradients import function_of, plain_gradients, refusing, wanted_position
from .operands import is_dtensor
from .plain import plainness
from .plain_calls import plain_functions
from .transforms import kernels_serve

__all__ = ["Formula"]


class Formula:
    """A function with a fused forward, a fused backward, and one formula in plain PyTorch.

    A call runs the kernels. Where they cannot serve (``torch.func``, forward mode, tracers) it runs
    the formula. Derivatives beyond the first are those of the formula. DTensors run shard by shard.
    ``vmap`` without gradients makes a batch of rows more rows.

    Args:
        name: what users call the function by; messages begin with it.
        forward: the raw operator, ``(tensors..., options...) -> (outputs..., statistics...)``.
        backward: the raw operator, ``(gradients of outputs..., *saves) -> gradients of grads``. It
            may take one argument more, by a name that is not in ``saves``: whether any gradient of
            ``shared`` is wanted. It takes None for an output without a gradient if its schema says
            ``Tensor?`` there, else zeros.
        reference: ``forward`` in plain PyTorch, with the same arguments and results.
        saves: names of arguments and results of ``forward`` that ``backward`` takes, in its order.
        grads: names of the arguments that have gradients, in the order of the backward's results.
        rows: name of each argument that is made of rows, and how many dimensions its row has; -1
            for all but the first. Every result has the same dimensions before its row.
        shared: names of the tensors that all rows share; their gradients are sums over rows.
        outputs: how many results are the user's; the others are statistics, without gradients.
        plain_backward: ``backward`` in plain PyTorch, whose results can be differentiated; it may
            use values of statistics, but must keep their derivatives. With it, only ``saves`` are
            kept for the backward; without it, every tensor is kept, for ``reference``.
        arrange: makes the gradients of ``grads`` from the backward's results, if they differ.
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
        plain_backward: Callable[..., Any] | None = None,
        arrange: Callable[..., tuple[Tensor, ...]] | None = None,
    ) -> None:
        self.name, self.reference, self.outputs = name, reference, outputs
        self.forward, self.backward = forward, backward
        self.saves, self.plain_backward, self.arrange = saves, plain_backward, arrange
        arguments = forward._schema.arguments
        names = [argument.name for argument in arguments]
        self.names = names
        self.results = [result.name for result in forward._schema.returns]
        self.tensors = sum("Tensor" in str(argument.type) for argument in arguments)
        for save in saves:
            (names + self.results).index(save)
        self.grads = [names.index(grad) for grad in grads]
        self.rows = {names.index(row): dims for row, dims in rows.items()}
        self.shared = [names.index(tensor) for tensor in shared]
        self._differentiate(plain_backward)
        register_vmap(forward, self.rows)
        register_vmap(backward, self._rows_of_backward())

    def from_output(self, saves: Sequence[str], backward: Any, plain_backward: Any) -> Formula:
        """The same function, whose backward recovers the input from what it keeps: the output.

        Its gradients cannot be differentiated again, which raises RuntimeError.

        Args:
            saves, backward: as of the class.
            plain_backward: ``backward`` in plain PyTorch, for decompositions.
        """
        formula = copy.copy(self)
        formula.saves, formula.backward, formula.plain_backward = saves, backward, plain_backward
        formula._differentiate(refusing(self.name, backward))
        register_vmap(backward, formula._rows_of_backward())
        return formula

    def _differentiate(self, again: Callable[..., Any] | None) -> None:
        """Make the functions that serve calls; ``plain`` are those of plain ones.

        Who has asked :func:`~.plain.plainness` anyway calls ``formula.plain[answer]``.
        """
        function = function_of(self, again)
        self._apply, self.plain = function.apply, plain_functions(self, function, again is None)

    def __call__(self, *arguments: Any) -> Any:
        """Return the output, or a tuple of several."""
        if answer := plainness(*arguments[: self.tensors]):
            return self.plain[answer](*arguments)
        if type(arguments[0]) is not Tensor and any(map(is_dtensor, arguments[: self.tensors])):
            from .shards import on_shards

            return on_shards(self, arguments)
        if not kernels_serve():
            return self.public_outputs(self.reference(*arguments))
        if torch.is_grad_enabled():
            for i in self.grads:
                if arguments[i] is not None and arguments[i].requires_grad:
                    return self._apply(*arguments)
        return self.public_outputs(self.forward(*arguments))

    def public_outputs(self, results: Any) -> Any:
        """The outputs among results."""
        if self.outputs > 1:
            return results[: self.outputs]
        return results if isinstance(results, Tensor) else results[0]

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """Both operators in ATen's, for ``ExportedProgram.run_decompositions``."""
        if self.plain_backward is not None:
            return {self.forward: self.reference, self.backward: self.plain_backward}

        position = wanted_position(self)

        def backward(*given: Any) -> Any:
            gradients, saves = given[: self.outputs], list(given[self.outputs :])
            are_wanted = position is None or saves.pop(position)  # those of `shared`
            saved = dict(zip(self.saves, saves, strict=False))  # torch leaves out defaults
            defaults = inspect.signature(self.reference).parameters
            arguments = [saved.get(name, p.default) for name, p in defaults.items()]
            results = plain_gradients(
                self.reference, self.outputs, self.grads, gradients, arguments
            )
            if not are_wanted:
                empty = gradients[0].new_empty([0])
                pairs = zip(self.grads, results, strict=True)
                results = [empty if i in self.shared else result for i, result in pairs]
            return results[0] if len(results) == 1 else results

        return {self.forward: self.reference, self.backward: backward}

    def _rows_of_backward(self) -> dict[int, int | None]:
        """Samples are more rows, except where each sample needs its own sum over its rows."""
        if self.shared:
            return {}
        rows: dict[int, int | None] = dict.fromkeys(range(self.outputs))
        of_arguments = {self.names[i]: dims for i, dims in self.rows.items()}
        for position, name in enumerate(self.saves, start=self.outputs):
            if name in of_arguments or name in self.results:
                rows[position] = of_arguments.get(name)
        return rows
