"""Checks and preparation of gradients before a step, so that a step that fails changes nothing."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .sharding import differ_in_placement, is_sharded

SMALL_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

_form_of = operator.attrgetter("shape", "dtype", "device", "layout")
_PLAIN = {Tensor, torch.nn.Parameter}


def check_gradients(
    op: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    any_dtype: bool = False,
    forms: Sequence[Any] | None = None,
) -> None:
    """Raise a clear error for the first gradient that a fused step cannot use.

    Args:
        any_dtype: gradients may be of another dtype than their parameter, of up to 32 bits.
        forms: :func:`forms_of` the parameters, if known.

    Raises:
        RuntimeError: a gradient is sparse, its shape, dtype or device is not its parameter's, or
            it has no memory.
    """
    if forms is None:
        forms = forms_of(params)
    if _PLAIN.issuperset(map(type, grads)) and list(map(_form_of, grads)) == forms:
        check_allocated(op, "the gradient of parameter", grads)
        return
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"{op}: the gradient of parameter {index} is sparse ({grad.layout}), which fused "
                "optimizers do not support; use torch.optim.SparseAdam or torch.optim.SGD for it."
            )
        if differ_in_placement(param, grad):
            raise RuntimeError(
                f"{op}: parameter {index} and its gradient are not sharded alike: {_placed(param)} "
                f"and {_placed(grad)}. Redistribute the gradient to the parameter's placements."
            )
        may_differ = any_dtype and not param.is_complex()
        is_typed = grad.dtype == param.dtype or (may_differ and grad.dtype in SMALL_FLOATS)
        if not is_typed or (grad.shape, grad.device) != (param.shape, param.device):
            expected = (
                "be float32, float16 or bfloat16 and have shape"
                if may_differ
                else "have shape, dtype"
            )
            raise RuntimeError(
                f"{op}: parameter {index} and its gradient differ: {describe(param)} and "
                f"{describe(grad)}. Gradients must {expected} and device of their "
                "parameter; cast them, or use apex.amp."
            )
    check_allocated(op, "the gradient of parameter", grads)


def forms_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Shape, dtype, device and layout of each tensor."""
    return list(map(_form_of, tensors))


def check_allocated(op: str, what: str, tensors: Sequence[Tensor]) -> None:
    """Raise RuntimeError for the first tensor with elements whose memory was given back.

    Args:
        what: the tensors, for the message, without their number.
    """
    if 0 not in map(Tensor.data_ptr, tensors):
        return
    for index, tensor in enumerate(tensors):
        if is_sharded(tensor) or tensor.device.type not in ("cpu", "cuda") or not tensor.numel():
            continue
        if tensor.data_ptr() == 0:
            raise RuntimeError(
                f"{op}: {what} {index} is {describe(tensor)}, but its data is not allocated yet: "
                "its storage was resized to 0 bytes, as FSDP does with parameters that it has "
                "gathered. Step when the memory is allocated."
            )


def check_states(
    op: str, params: Sequence[Tensor], states: Sequence[dict[str, Any]], keys: Sequence[str]
) -> None:
    """Raise RuntimeError for the first state that was made for another parameter, or is freed."""
    for index, (param, state) in enumerate(zip(params, states, strict=True)):
        for key in keys:
            if key in state and not _has_shape(state[key], param.shape):
                got = describe(state[key]) if isinstance(state[key], Tensor) else repr(state[key])
                raise RuntimeError(
                    f"{op}: state {key!r} of parameter {index} is {got}, but the parameter is "
                    f"{describe(param)}. Replace the state by one of this shape, or remove the "
                    "parameter's entry from optimizer.state, which makes a new one."
                )
    for key in keys:
        kept = [state[key] for state in states if key in state]
        check_allocated(op, f"state {key!r}", kept)


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape


def check_dense(op: str, params: Sequence[Tensor]) -> None:
    """Raise RuntimeError for the first parameter whose elements do not fill its memory, or are the
    conjugates of what is there.
    """
    check_allocated(op, "parameter", params)
    for index, param in enumerate(params):
        if param.is_conj():
            raise RuntimeError(
                f"{op}: parameter {index}, {describe(param)}, is a conjugated view of other "
                "memory. Optimize what it is a view of, or its resolve_conj()."
            )
        if not (param.is_contiguous() or _is_dense(param)):
            raise RuntimeError(
                f"{op}: parameter {index}, {describe(param)}, was not contiguous in any memory "
                f"format: its strides are {list(param.stride())}. Optimize the tensor that it is a "
                "view of, or a contiguous copy."
            )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill memory without gaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _placed(tensor: Tensor) -> str:
    if not is_sharded(tensor):
        return "a plain tensor"
    return f"{tuple(tensor.placements)} on {tensor.device_mesh}"


def describe(tensor: Tensor) -> str:
    """Shape, dtype and device for messages: ``[4, 3] float32 on cuda:0``."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {dtype} on {tensor.device}"


def match_layouts(params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, copied where their memory is not laid out as their parameter's is.

    Autograd keeps both alike; gradients that a user or another library sets may differ. So may
    those that come through complex numbers: in memory they can be the negative of what they are.
    """
    return [
        grad
        if grad.stride() == param.stride() and not grad.is_neg()
        else torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        for param, grad in zip(params, grads, strict=True)
    ]


def write_back(grad: Tensor, copy: Tensor) -> None:
    """Give a gradient, whose elements may share memory with each other, the values of its copy."""
    for dimension, (size, stride) in enumerate(zip(grad.shape, grad.stride(), strict=True)):
        if size > 1 and stride == 0:  # expanded: these elements are one
            grad, copy = grad.narrow(dimension, 0, 1), copy.narrow(dimension, 0, 1)
    grad.copy_(copy)
