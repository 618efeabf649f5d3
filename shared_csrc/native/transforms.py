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

    torch itself raises there, except in compiled code, where gradients would be zeros and tangents
    of forward mode would be lost.
    """
    if is_transformed() or (torch.compiler.is_compiling() and _in_forward_mode()):
        raise NotImplementedError(f"{name}: torch.func cannot transform this function. {remedy}")


def kernels_serve() -> bool:
    """Whether operators can serve this call.

    They serve ``vmap`` without gradients. They do not serve forward mode, other transforms of
    ``torch.func``, ``torch.jit.trace``, or an export to ONNX, whose runtime does not know them.

    Ask before an operator or an ``autograd.Function`` is called; otherwise some derivatives are
    silently lost.
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

    It is with ``create_graph=True``, and always in forward mode.
    """
    return torch.is_grad_enabled() or _in_forward_mode()


def _in_forward_mode() -> bool:
    return forward_ad._current_level >= 0
