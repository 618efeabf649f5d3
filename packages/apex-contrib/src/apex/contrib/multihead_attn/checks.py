"""What attention functions are given: messages say what was expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._shared.native.operands import FLOATS, check_floating

__all__ = [
    "check_heads",
    "check_inputs",
    "check_mask",
    "check_norm",
    "check_parameters",
    "check_probability",
    "is_same",
]


def check_probability(name: str, p: float) -> None:
    """Raise ValueError unless ``p`` is a probability."""
    if not 0 <= p <= 1:
        raise ValueError(f"{name}: dropout_prob must be in [0, 1], got {p}.")


def check_heads(name: str, what: str, size: int, heads: int) -> None:
    """Raise ValueError unless heads divide a size."""
    if heads < 1 or size % heads:
        raise ValueError(f"{name}: {what}, {size}, must be a multiple of heads, got {heads}.")


def check_mask(
    name: str,
    argument: str,
    mask: Tensor,
    shape: Sequence[int],
    device: torch.device,
    is_added: bool,
) -> None:
    """Raise TypeError or ValueError unless ``mask`` hides keys, or is added to scores."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name}: {argument} must be a tensor or None, got {type(mask).__name__}.")
    if is_added:
        check_floating(name, argument, mask)
        if mask.requires_grad:
            raise ValueError(
                f"{name}: {argument} requires a gradient, but gets none: it is no part of the "
                "model here. Pass its detach(), or add it to the scores yourself."
            )
    if tuple(mask.shape) != tuple(shape):
        raise ValueError(
            f"{name}: {argument} must have shape {list(shape)}, got {list(mask.shape)}."
        )
    if mask.device != device:
        raise ValueError(
            f"{name}: {argument} is on {mask.device}, but the inputs are on {device}; move one."
        )


def check_inputs(name: str, heads: int, inputs: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError unless inputs are ``[t, b, e]``, of one dtype and device."""
    first_name, first = next(iter(inputs.items()))
    for argument, x in inputs.items():
        if not isinstance(x, Tensor) or x.dtype not in FLOATS or x.layout is not torch.strided:
            check_floating(name, argument, x)
        if x.dim() != 3 or x.shape[1:] != first.shape[1:]:
            shape = "[time, batch, embed_dim]"
            if x is not first and first.dim() == 3:
                shape = f"[time, {first.shape[1]}, {first.shape[2]}], as {first_name}"
            raise ValueError(f"{name}: {argument} must have shape {shape}, got {list(x.shape)}.")
        if x.dtype != first.dtype or x.device != first.device:
            raise TypeError(
                f"{name}: {argument} is {x.dtype} on {x.device}, but {first_name} is "
                f"{first.dtype} on {first.device}; they must be alike."
            )
    check_heads(name, "embed_dim", first.shape[2], heads)


def check_norm(name: str, inputs: Tensor, gamma: Any, beta: Any) -> None:
    """Raise TypeError or ValueError unless gamma and beta fit inputs ``[t, b, e]``."""
    for argument, vector in (("gamma", gamma), ("beta", beta)):
        if not isinstance(vector, Tensor) or vector.dtype != inputs.dtype:
            got = vector.dtype if isinstance(vector, Tensor) else type(vector).__name__
            raise TypeError(f"{name}: {argument} must be {inputs.dtype}, as the inputs, got {got}.")
        if vector.shape != inputs.shape[-1:] or vector.device != inputs.device:
            raise ValueError(
                f"{name}: {argument} must have shape [{inputs.shape[-1]}] on {inputs.device}, got "
                f"{list(vector.shape)} on {vector.device}."
            )


def check_parameters(
    name: str, inputs: Tensor, parameters: Mapping[str, int], tensors: Sequence[Tensor | None]
) -> None:
    """Check parameters, whose names come with rows as a multiple of embed_dim; negative: a bias.

    Raise TypeError or ValueError unless they have the dtype and device of ``inputs`` and the shape
    ``[rows * embed_dim, embed_dim]``, or that of a bias, ``[rows * embed_dim]``.
    """
    e, dtype = inputs.shape[2], inputs.dtype
    for (argument, rows), tensor in zip(parameters.items(), tensors, strict=True):
        if tensor is None and rows < 0:
            continue
        shape = (-rows * e,) if rows < 0 else (rows * e, e)
        is_tensor = isinstance(tensor, Tensor)
        if not is_tensor or tensor.dtype is not dtype or tensor.layout is not torch.strided:
            check_floating(name, argument, tensor)
        if tensor.dtype != dtype:
            raise TypeError(
                f"{name}: {argument} is {tensor.dtype}, but the inputs are {inputs.dtype}; cast "
                "one, or use autocast."
            )
        if tuple(tensor.shape) != shape or tensor.device != inputs.device:
            raise ValueError(
                f"{name}: {argument} must have shape {list(shape)} on {inputs.device}, for inputs "
                f"{list(inputs.shape)}; got {list(tensor.shape)} on {tensor.device}."
            )


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two names are of one tensor, or of views of the same memory."""
    if a is b or torch.compiler.is_compiling():
        return a is b
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
