"""Checks and preparation of gradients before a step, so that a step that fails changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_gradients(op: str, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Raise a clear error for the first gradient that a fused step cannot use.

    Raises:
        RuntimeError: a gradient is sparse, or its shape, dtype or device is not its parameter's.
    """
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"{op}: the gradient of parameter {index} is sparse ({grad.layout}), which fused "
                "optimizers do not support; use torch.optim.SparseAdam or torch.optim.SGD for it."
            )
        if (grad.shape, grad.dtype, grad.device) != (param.shape, param.dtype, param.device):
            raise RuntimeError(
                f"{op}: parameter {index} and its gradient differ: {describe(param)} and "
                f"{describe(grad)}. Gradients must have shape, dtype and device of their "
                "parameter; cast them, or use apex.amp."
            )


def describe(tensor: Tensor) -> str:
    """Shape, dtype and device for messages: ``[4, 3] float32 on cuda:0``."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {dtype} on {tensor.device}"


def match_layouts(params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, copied where their memory is not laid out as their parameter's is.

    Autograd keeps both alike; gradients that a user or another library sets may differ.
    """
    return [
        grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)
        for param, grad in zip(params, grads, strict=True)
    ]
