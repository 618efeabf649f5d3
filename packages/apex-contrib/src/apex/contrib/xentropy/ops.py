"""The softmax_xentropy operators: schemas, documentation and fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import library


@library.define(
    "softmax_xentropy_forward(Tensor logits, Tensor labels, float smoothing, int? padding_idx, "
    "bool half_to_float) -> (Tensor losses, Tensor maxima, Tensor sums_exp)"
)
def softmax_xentropy_forward(
    logits: Tensor,
    labels: Tensor,
    smoothing: float,
    padding_idx: int | None,
    half_to_float: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy of every row of logits with its label, reading the logits once.

    ``loss = (1 - s) * (lse - logits[label]) + s * (lse - mean(logits))`` with
    ``lse = log(sum(exp(logits)))``.

    Args:
        logits: ``[N, C]``, float64, float32, float16 or bfloat16, any strides; copied first unless
            the elements of a row are adjacent. Computed in float32, or float64 for float64.
        labels: ``[N]`` int64, each in ``[0, C)`` or equal to ``padding_idx``. On a GPU, where
            raising an error would have to wait for the kernel, any other label gives a loss of NaN
            and a gradient of NaN for its row; no memory out of bounds is read.
        smoothing: ``s``, in ``[0, 1]``.
        padding_idx: rows with this label are not read; their loss is 0. None: there are none.
        half_to_float: losses of 16-bit logits are float32.

    Returns:
        losses: ``[N]``, of the logits' dtype or float32.
        maxima: ``[N]`` float32, or float64 for float64 logits: the largest logit of each row.
        sums_exp: ``[N]``, of the same dtype: ``sum(exp(logits - max))``, so that
            ``lse = max + log(sum_exp)``. Two numbers, because gradients would inherit the rounding
            error of their sum, which grows with the logits. Padding rows have 0 and 1.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, or a label is out of range (CPU).

    Source:
        Milakov & Gimelshein 2018, for the single pass.
    """
    rows = logits.shape[0]
    dtype = torch.float32 if half_to_float else logits.dtype
    wide = torch.promote_types(logits.dtype, torch.float32)
    return tuple(logits.new_empty(rows, dtype=d) for d in (dtype, wide, wide))


@library.define(
    "softmax_xentropy_backward(Tensor grad_losses, Tensor logits, Tensor maxima, Tensor sums_exp, "
    "Tensor labels, float smoothing, int? padding_idx) -> Tensor"
)
def softmax_xentropy_backward(
    grad_losses: Tensor,
    logits: Tensor,
    maxima: Tensor,
    sums_exp: Tensor,
    labels: Tensor,
    smoothing: float,
    padding_idx: int | None,
) -> Tensor:
    """Gradient of :data:`softmax_xentropy_forward` with respect to the logits.

    ``grad_logits = grad_loss * (exp(logits - max) / sum_exp - s / C - (1 - s) * onehot(label))``

    Args:
        grad_losses: ``[N]``, of the losses' dtype; read only.
        logits, labels, smoothing, padding_idx: as in the forward pass.
        maxima, sums_exp: ``[N]``, from the forward pass.

    Returns:
        ``[N, C]``, contiguous, of the logits' dtype; 0 in padding rows, whatever their logits are.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, or a label is out of range (CPU).
    """
    return logits.new_empty(logits.shape)
