"""Apex's extension module of the causal softmax: its positional signatures over this wheel's ops.

Importable only where the kernels can run, because callers take the import as that answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex.transformer.functional import checked_softmax as _softmax

_softmax.require(__name__)

__all__ = ["backward", "forward"]


@torch.no_grad()
def forward(inputs: Tensor, scale: float) -> Tensor:
    """Causal softmax of ``[batch * heads, sequence, sequence]``, like ``inputs``."""
    return _softmax.causal("scaled_upper_triang_masked_softmax_cuda.forward", inputs, scale)


@torch.no_grad()
def backward(output_grads: Tensor, softmax_results: Tensor, scale: float) -> Tensor:
    """Gradient of the inputs, like ``softmax_results``, which the forward gave."""
    return _softmax.causal_backward(
        "scaled_upper_triang_masked_softmax_cuda.backward", output_grads, softmax_results, scale
    )
