"""Apex's extension module of the masked softmax: its positional signatures over this wheel's ops.

Importable only where the kernels can run, because callers take the import as that answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex.transformer.functional import checked_softmax as _softmax

_softmax.require(__name__)

__all__ = ["backward", "forward", "get_batch_per_block"]


@torch.no_grad()
def forward(inputs: Tensor, mask: Tensor, scale: float) -> Tensor:
    """See :func:`apex.transformer.functional.fused_softmax.scaled_masked_softmax`."""
    return _softmax.masked("scaled_masked_softmax_cuda.forward", inputs, mask, scale)


@torch.no_grad()
def backward(output_grads: Tensor, softmax_results: Tensor, scale: float) -> Tensor:
    """Gradient of the inputs, like ``softmax_results``, which the forward gave."""
    return _softmax.backward(
        "scaled_masked_softmax_cuda.backward", output_grads, softmax_results, scale
    )


def get_batch_per_block(query_seq_len: int, key_seq_len: int, batches: int, attn_heads: int) -> int:
    """Rows that one block of Apex's kernel takes, for code that asks; here no size matters."""
    return _softmax.batch_per_block(key_seq_len)
