"""Functions that are composed of torch's matrix products and operators: see :class:`Composed`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_any_autocast_enabled
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import Function, forward_ad
from torch.compiler import is_dynamo_compiling

from .gradients import plain_gradients
from .operands import is_autocast, is_dtensor
from .plain import apply_of, plainness
from .transforms import kernels_serve

__all__ = ["Composed", "plainly"]


class Composed:
    """What a Formula is for one operator, for a function of several and of torch's products.

    A call runs ``forward``, and its gradient ``backward``, both with autocast off: otherwise
    autocast would round the products inside, in a backward that is called under it too.
    Where operators cannot serve (``torch.func``, forward mode, tracers, DTensors), and for
    derivatives beyond the first, ``reference`` runs.

    Args:
        name: what users call the function by.
        forward: ``(option, *tensors) -> (output, *kept)``; tensors but the first may be None.
        backward: ``(option, needs, dy, (*tensors, *kept)) -> gradients of the tensors``; None is
            enough where ``needs`` says False.
        reference: ``(option, *tensors) -> output`` in plain PyTorch.
        output: ``(*tensors) -> output``, where ``forward`` keeps nothing but that.
        is_asked: whether ``forward`` and ``backward`` take an argument ``plain`` by name: True in
            plain calls, which no compiler sees, else False.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., tuple[Tensor, ...]],
        backward: Callable[..., Sequence[Tensor | None]],
        reference: Callable[..., Tensor],
        output: Callable[..., Tensor] | None = None,
        is_asked: bool = False,
    ) -> None:
        self.forward, self.reference = forward, reference
        forward_of_call, backward_of_call = _functions(forward, backward, reference)
        self._apply = _function(name, forward_of_call, backward_of_call).apply
        if is_asked:
            forward, backward = (functools.partial(f, plain=True) for f in (forward, backward))
        of_plain = _plain_forward(forward) if output is None else _output_alone(output)
        # Who has asked plainness() anyway calls plain[answer].
        self.plain = (
            None,
            lambda *given: forward(*given)[0],
            apply_of(name, of_plain, _plain_backward(backward, backward_of_call), backward_of_call),
        )

    def __call__(self, option: Any, *tensors: Tensor | None) -> Tensor:
        """Return the output."""
        if answer := plainness(*tensors):
            return self.plain[answer](option, *tensors)
        if is_autocast(tensors[0]):
            return plainly(tensors[0], self, option, *tensors)
        if not kernels_serve() or any(map(is_dtensor, tensors)):
            return self.reference(option, *tensors)
        wants = [t for t in tensors if t is not None and t.requires_grad]
        if wants and is_grad_enabled():
            return self._apply(option, *tensors)
        return self.forward(option, *tensors)[0]


def plainly(like: Tensor, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with autocast off for the device of ``like``."""
    if not is_autocast(like):
        return function(*arguments)
    with torch.autocast(like.device.type, enabled=False):
        return function(*arguments)


def _function(name: str, forward: Any, backward: Any) -> type[Function]:
    statics = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (Function,), statics)


def _plain_forward(forward: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    """The forward of the autograd function of plain calls."""

    def apply_forward(ctx: Any, option: Any, *tensors: Any) -> Tensor:
        results = forward(option, *tensors)
        ctx.to_save = (*tensors, *results[1:])  # as save_for_backward() does
        ctx.option = option
        output = results[0]
        # torch lets nobody change a view in place that an autograd function has made.
        return output.detach() if output._is_view() else output

    return apply_forward


def _output_alone(output: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same of a function that keeps nothing but its tensors: a frame less."""

    def apply_forward(ctx: Any, option: Any, *tensors: Any) -> Tensor:
        ctx.to_save = tensors
        ctx.option = option
        y = output(*tensors)
        return y.detach() if y._is_view() else y

    return apply_forward


def _plain_backward(backward: Any, general: Any) -> Callable[..., Any]:
    """The backward of the autograd function of plain calls; leaves to ``general`` what is not."""

    def apply_backward(ctx: Any, dy: Tensor) -> Any:
        if (
            is_grad_enabled()
            or forward_ad._current_level >= 0
            or _is_any_autocast_enabled()
            or is_legacy_batchedtensor(dy)
        ):
            return general(ctx, dy)
        return (None, *backward(ctx.option, ctx.needs_input_grad[1:], dy, ctx.saved_tensors))

    return apply_backward


def _functions(forward: Any, backward: Any, reference: Any) -> tuple[Any, Any]:
    """The forward and the backward of the autograd function of all calls."""

    def apply_forward(ctx: Any, option: Any, *tensors: Any) -> Tensor:
        results = forward(option, *tensors)
        ctx.save_for_backward(*tensors, *results[1:])
        ctx.option = option
        output = results[0]
        is_view = not torch.compiler.is_compiling() and output._is_view()  # as above
        return output.detach() if is_view else output

    def apply_backward(ctx: Any, dy: Tensor) -> Any:
        if is_autocast(dy):
            return plainly(dy, apply_backward, ctx, dy)
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        # A batch of gradients (is_grads_batched=True) cannot be written to memory that is none.
        is_again = not is_dynamo_compiling() and is_legacy_batchedtensor(dy)
        if is_again or is_grad_enabled() or forward_ad._current_level >= 0:
            return (None, *again(ctx.option, needs, dy, saved))
        return (None, *backward(ctx.option, needs, dy, saved))

    def again(option: Any, needs: Sequence[bool], dy: Tensor, saved: Any) -> list[Tensor | None]:
        wanted = [i for i, needed in enumerate(needs, start=1) if needed]
        found = plain_gradients(reference, 1, wanted, (dy,), (option, *saved[: len(needs)]))
        gradients: list[Tensor | None] = [None] * len(needs)
        for i, gradient in zip(wanted, found, strict=True):
            gradients[i - 1] = gradient
        return gradients

    return apply_forward, apply_backward
