"""A backward that works once: what it returns refuses to be differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.compiler import is_dynamo_compiling


class _NoSecondDerivative(Function):
    """Passes gradients through, and refuses to be differentiated."""

    @staticmethod
    def forward(
        ctx: Any, message: str, count: int, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.message = message
        # No views: autograd would refuse in-place changes of them.
        return tuple(t if t is None else t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(ctx.message)

    jvp = backward  # forward mode over a gradient


def not_twice_differentiable(
    name: str, remedy: str, plain: bool = False
) -> Callable[[Callable], Callable]:
    """Decorate a function's ``backward``: its gradients raise where they are differentiated.

    It is given memory for a gradient of zeros that autograd hands on without, as of torch.sgn.
    ``once_differentiable`` raises only if the incoming gradient itself requires one; it would
    silently ignore a gradient penalty on ``y.sum()``. Save the tensors that the gradients depend on
    as the function got them: a copy has no connection to the graph.

    Args:
        name, remedy: of the function, and what to use instead, for the message.
        plain: whether it is the backward of plain calls, which no compiler sees.
    """
    message = f"{name}: the gradient cannot be differentiated again. {remedy}"

    def decorate(backward: Callable) -> Callable:
        @functools.wraps(backward)
        def wrapped(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            if (plain or not is_dynamo_compiling()) and dy._is_zerotensor():
                dy = torch.zeros_like(dy)
            if not (torch.is_grad_enabled() or forward_ad._current_level >= 0):
                return backward(ctx, dy)
            with torch.no_grad():
                grads = backward(ctx, dy)
            given = *grads, dy, *ctx.saved_tensors
            return _NoSecondDerivative.apply(message, len(grads), *given)

        return wrapped

    return decorate
