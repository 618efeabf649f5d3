"""Apex's extension module of the masked softmax of any size, over this wheel's ops.

Importable only where the kernels can run, because callers take the import as that answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex.transformer.functional import checked_softmax as _softmax

_softmax.require(__name__)

__all__ = ["backward", "forward"]


@torch.no_grad()
def forward(inputs: Tensor, mask: Tensor, scale: float) -> Tensor:
    """See :func:`apex.transformer.functional.fused_softmax.scaled_masked_softmax`."""
    return _softmax.masked("generic_scaled_masked_softmax_cuda.forward", inputs, mask, scale)


@torch.no_grad()
def backward(output_grads: Tensor, softmax_results: Tensor, scale: float) -> Tensor:
    """Gradient of the inputs, like ``softmax_results``, which the forward gave."""
    return _softmax.backward(
        "generic_scaled_masked_softmax_cuda.backward", output_grads, softmax_results, scale
    )
