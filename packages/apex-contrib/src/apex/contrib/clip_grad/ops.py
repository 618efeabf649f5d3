"""The operators of clip_grad_norm_: schemas, documentation and fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import library

__all__ = ["clip_grad_", "clip_grad_total_norm"]


@library.define("clip_grad_total_norm(Tensor[] grads, float norm_type) -> Tensor")
def clip_grad_total_norm(grads: list[Tensor], norm_type: float) -> Tensor:
    """Norm of all elements of a list of tensors, as if they were one vector.

    Args:
        grads: at least one tensor; one dtype (float64, float32, float16 or bfloat16), one device;
            any shapes, dense memory.
        norm_type: 1, 2 or infinity.

    Returns:
        The norm, float64 ``[1]``. Terms are added in chunks of fixed size and in a fixed order: the
        number of threads changes nothing. No finite input of up to 32 bits overflows.

    Raises:
        RuntimeError: the list is empty, norm_type is another, or dtypes, devices or layouts do not
            match.
    """
    return grads[0].new_empty(1, dtype=torch.float64)


@library.define("clip_grad_(Tensor(a!)[] grads, Tensor norm, float max_norm) -> ()")
def clip_grad_(grads: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """``grads[i] *= min(1, max_norm / (norm + 1e-6))``; nothing is written where that is 1.

    Args:
        grads: as for :func:`clip_grad_total_norm`. The list may be empty.
        norm: float64, one element, on the same device.
        max_norm: the largest norm that stays as it is.

    The product is taken in float32 (float64 for float64) and rounded once. A NaN in ``norm`` goes
    into all gradients.

    Raises:
        RuntimeError: dtypes, devices or layouts do not match; nothing is written then.
    """
