"""Functions that are composed of torch's matrix products and operators: see :class:`Composed`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import Function

from .gradients import plain_gradients, quick_apply
from .operands import is_autocast, is_dtensor
from .transforms import differentiated_again, kernels_serve

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
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., tuple[Tensor, ...]],
        backward: Callable[..., Sequence[Tensor | None]],
        reference: Callable[..., Tensor],
    ) -> None:
        self.forward, self.reference = forward, reference
        self._apply = quick_apply(_function_of(name, forward, backward, reference))

    def __call__(self, option: Any, *tensors: Tensor | None) -> Tensor:
        """Return the output."""
        if is_autocast(tensors[0]):
            return plainly(tensors[0], self, option, *tensors)
        return self.without_autocast(option, *tensors)

    def without_autocast(self, option: Any, *tensors: Tensor | None) -> Tensor:
        """Return the output; for callers who know that autocast is off."""
        has_kernels, has_grad = kernels_serve(), False
        for tensor in tensors:
            if tensor is None:
                continue
            if tensor.requires_grad:
                has_grad = True
            if type(tensor) is not Tensor and is_dtensor(tensor):
                has_kernels = False
        if not has_kernels:
            return self.reference(option, *tensors)
        if has_grad and torch.is_grad_enabled():
            return self._apply(option, *tensors)
        return self.forward(option, *tensors)[0]


def plainly(like: Tensor, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with autocast off for the device of ``like``."""
    if not is_autocast(like):
        return function(*arguments)
    with torch.autocast(like.device.type, enabled=False):
        return function(*arguments)


def _function_of(name: str, forward: Any, backward: Any, reference: Any) -> type[Function]:
    """The autograd function; it runs at every step, so count its calls."""

    def apply_forward(ctx: Any, option: Any, *tensors: Any) -> Tensor:
        results = forward(option, *tensors)
        ctx.save_for_backward(*tensors, *results[1:])
        ctx.option = option
        output = results[0]
        # torch lets nobody change a view in place that an autograd function has made.
        is_view = not torch.compiler.is_compiling() and output._is_view()
        return output.detach() if is_view else output

    def apply_backward(ctx: Any, dy: Tensor) -> Any:
        if is_autocast(dy):
            return plainly(dy, apply_backward, ctx, dy)
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        # A batch of gradients (is_grads_batched=True) cannot be written to memory that is none.
        is_batch = not torch.compiler.is_compiling() and is_legacy_batchedtensor(dy)
        run = again if is_batch or differentiated_again() else backward
        return (None, *run(ctx.option, needs, dy, saved))

    def again(option: Any, needs: Sequence[bool], dy: Tensor, saved: Any) -> list[Tensor | None]:
        wanted = [i for i, needed in enumerate(needs, start=1) if needed]
        found = plain_gradients(reference, 1, wanted, (dy,), (option, *saved[: len(needs)]))
        gradients: list[Tensor | None] = [None] * len(needs)
        for i, gradient in zip(wanted, found, strict=True):
            gradients[i - 1] = gradient
        return gradients

    statics = {"forward": staticmethod(apply_forward), "backward": staticmethod(apply_backward)}
    return type(name, (Function,), statics)
