"""Apex's extension module of transducers' loss: its positional signatures over this wheel's ops.

Importable only where the kernels can run, because callers take the import as that answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex.contrib._ops import library
from apex.contrib.transducer.loss import arguments_of as _arguments_of
from apex.contrib.transducer.transducer_loss import ops as _ops

library.require_for_import(__name__, "transducer_loss")

__all__ = ["backward", "forward"]


@torch.no_grad()
def forward(
    x: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    batch_offset: Tensor | None,
    max_f_len: int,
    blank_idx: int,
    opt: int,
    packed_input: bool,
) -> list[Tensor]:
    """Return alpha and beta, float32 or float64 for float64, and the loss in the dtype of ``x``.

    ``x`` has logarithms of probabilities, not logits. Shapes, dtypes and errors
    are those of :class:`apex.contrib.transducer.TransducerLoss`; ``opt`` has no effect.
    """
    packed = (batch_offset, max_f_len) if packed_input else None
    given = _arguments_of(x, label, f_len, y_len, blank_idx, packed, False)
    loss, *_, alpha, beta = _ops.transducer_loss_forward(*given)
    return [alpha.to(loss.dtype), beta.to(loss.dtype), loss.to(x.dtype)]


@torch.no_grad()
def backward(
    x: Tensor,
    loss_grad: Tensor,
    alpha: Tensor,
    beta: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    label: Tensor,
    batch_offset: Tensor | None,
    max_f_len: int,
    blank_idx: int,
    opt: int,
    fuse_softmax_backward: bool,
    packed_input: bool,
) -> Tensor:
    """Return the gradient of the logits; without ``fuse_softmax_backward`` that of ``x`` itself.

    ``alpha`` and ``beta`` are computed anew, in float64: their shapes alone are checked.

    Raises:
        ValueError: as the forward, or ``alpha`` or ``beta`` is not shaped as ``x`` without classes.
    """
    packed = (batch_offset, max_f_len) if packed_input else None
    given = _arguments_of(x, label, f_len, y_len, blank_idx, packed, fuse_softmax_backward)
    for name, tensor in (("alpha", alpha), ("beta", beta)):
        if tensor.shape != x.shape[:-1]:
            raise ValueError(
                f"transducer_loss_cuda: {name} must have shape {list(x.shape[:-1])}, got "
                f"{list(tensor.shape)}."
            )
    loss, *saved = _ops.transducer_loss_forward(*given)
    return _ops.transducer_loss_backward(loss_grad.to(loss.dtype), given[0], *saved, *given[1:])
