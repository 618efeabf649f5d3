"""Tells whether a call runs within a transform of torch.func, which operators cannot see."""

from __future__ import annotations

import torch


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` (grad, vmap, ...) is around this call, compiled or not.

    isinstance(), because torch's compiler takes what this returns for something else than None.
    """
    return isinstance(
        torch._C._functorch.peek_interpreter_stack(), torch._C._functorch.CInterpreter
    )


def refuse_transforms(name: str, remedy: str) -> None:
    """Raise within ``torch.func``; for the forward of an ``autograd.Function`` that it cannot take.

    torch raises there itself, but for compiled code: gradients are zeros then.
    """
    if is_transformed():
        raise NotImplementedError(f"{name}: torch.func cannot transform this function. {remedy}")
