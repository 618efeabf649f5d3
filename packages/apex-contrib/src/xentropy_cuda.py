"""Apex's extension module of the cross entropy: its positional signatures over this wheel's ops.

Importable only where the kernels can run, because callers take the import as that answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex.contrib._ops import library
from apex.contrib.xentropy import ops as _ops

library.require_for_import(__name__, "xentropy")

__all__ = ["backward", "forward"]


def forward(input: Tensor, labels: Tensor, smoothing: float, half_to_float: bool) -> list[Tensor]:
    """``[losses, log_sum_exp]`` of logits ``[N, C]`` and labels ``[N]``; no row is padding.

    ``log_sum_exp`` is float32, or float64 for float64 logits. Arguments and errors are those of
    ``apex.contrib.xentropy.ops.softmax_xentropy_forward``.
    """
    losses, maxima, sums_exp = _ops.softmax_xentropy_forward(
        input, labels, smoothing, None, half_to_float
    )
    return [losses, maxima + sums_exp.log()]


def backward(
    grad_loss: Tensor, logits: Tensor, max_log_sum_exp: Tensor, labels: Tensor, smoothing: float
) -> Tensor:
    """Gradient ``[N, C]`` of the logits; ``max_log_sum_exp`` is what :func:`forward` returned.

    Its rounding error is that of every gradient: up to 4e-6 of it where logits reach 100.
    :class:`apex.contrib.xentropy.SoftmaxCrossEntropyLoss` has no such error.
    """
    # exp(x - max) / sum_exp with the whole of lse for the maximum.
    ones = torch.ones_like(max_log_sum_exp)
    return _ops.softmax_xentropy_backward(
        grad_loss, logits, max_log_sum_exp, ones, labels, smoothing, None
    )
