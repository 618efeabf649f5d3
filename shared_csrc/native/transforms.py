"""Tells whether a call runs within a transform of torch.func, which operators cannot see."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` (grad, vmap, ...) is around this call, compiled or not.

    isinstance(), because torch's compiler takes what this returns for something else than None.
    """
    return isinstance(
        torch._C._functorch.peek_interpreter_stack(), torch._C._functorch.CInterpreter
    )


def refuse_transforms(name: str, remedy: str) -> None:
    """Raise within ``torch.func``; for the forward of an ``autograd.Function`` that it cannot take.

    torch raises there itself, but for compiled code: gradients are zeros then, and tangents of
    forward mode are lost.
    """
    if is_transformed() or (torch.compiler.is_compiling() and _in_forward_mode()):
        raise NotImplementedError(f"{name}: torch.func cannot transform this function. {remedy}")


def kernels_serve() -> bool:
    """Whether operators have an answer to what is around this call.

    To ``vmap`` without gradients they have; to forward mode, other transforms of ``torch.func``,
    ``torch.jit.trace`` and an export to ONNX, whose runtime does not know them, they have not.

    Ask before an operator or an ``autograd.Function`` is called: else derivatives are lost in
    part, without a word.
    """
    if forward_ad._current_level >= 0 or torch._C._get_tracing_state() is not None:
        return False
    if not torch.compiler.is_compiling():
        return not is_transformed() or not torch.is_grad_enabled()
    if is_transformed():  # compilers see grad mode only from outside
        return False
    return not (torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export())


def differentiated_again() -> bool:
    """Whether the gradient that a ``backward`` computes is differentiated in turn.

    By ``create_graph=True``, or in forward mode, which needs no such word.
    """
    return torch.is_grad_enabled() or _in_forward_mode()


def _in_forward_mode() -> bool:
    return forward_ad._current_level >= 0
