"""Complex tensors as real ones with a last dimension of 2: both parts are updated as real numbers.

That is what torch.optim does. Norms of these views are those of the complex numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def real_views(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Parameters and states as real tensors, which share their memory.

    Raises:
        RuntimeError: a tensor is a conjugated view.
    """
    return [torch.view_as_real(tensor) for tensor in tensors]


def is_lazy(tensor: Tensor) -> bool:
    """Whether memory holds the conjugates, or the negative, of what a tensor means."""
    return tensor.is_conj() or tensor.is_neg()


def real_gradients(grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients as real tensors: views, or copies of those that :func:`is_lazy` is true of.

    Those that are not complex, or not strided, are returned as they are: operators refuse them.
    """
    return [
        torch.view_as_real(grad.resolve_conj().resolve_neg())
        if grad.is_complex() and grad.layout == torch.strided
        else grad
        for grad in grads
    ]
