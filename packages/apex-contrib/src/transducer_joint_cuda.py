"""Apex's extension module of transducers' joint: its positional signatures over this wheel's ops.

Importable only where the kernels can run, because callers take the import as that answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex.contrib._ops import library
from apex.contrib.transducer.joint import TransducerJointFunc as _Joint
from apex.contrib.transducer.transducer_joint import ops as _ops

library.require_for_import(__name__, "transducer_joint")

__all__ = ["backward", "forward"]


@torch.no_grad()
def forward(
    f: Tensor,
    g: Tensor,
    f_len: Tensor,
    g_len: Tensor,
    batch_offset: Tensor | None,
    packed_batch: int,
    opt: int,
    pack_output: bool,
    relu: bool,
    dropout: bool,
    dropout_prob: float,
    tile_size: int,
) -> list[Tensor]:
    """Return the joint, and with ReLU or dropout the mask: bool, where a gradient passes.

    Shapes, dtypes and errors are those of :class:`apex.contrib.transducer.TransducerJoint`; ``opt``
    and ``tile_size`` have no effect.
    """
    masks: list[Tensor] = []
    options = (batch_offset, packed_batch, opt, tile_size, dropout_prob, masks)
    return [_Joint.apply(f, g, f_len, g_len, pack_output, relu, dropout, *options), *masks]


@torch.no_grad()
def backward(
    inputs: list[Tensor],
    f_len: Tensor,
    g_len: Tensor,
    batch_offset: Tensor | None,
    max_f_len: int,
    max_g_len: int,
    pack_output: bool,
    scale: float,
) -> list[Tensor]:
    """Return the gradients of ``f`` and ``g``, ``[B, max_f_len, H]`` and ``[B, max_g_len, H]``.

    Args:
        inputs: the joint's gradient, and perhaps the mask that the forward returned.
        scale: multiplies it where the mask is True: ``1 / (1 - dropout_prob)``.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit.
    """
    dh, *masks = inputs
    batch, columns = len(f_len), dh.shape[-1]
    f, g = (dh.new_empty(batch, count, columns) for count in (max_f_len, max_g_len))
    keep = masks[0].bool() if masks else None
    rows = dh.shape[0] if pack_output else 0
    offset = batch_offset.long() if pack_output else None
    lengths = f_len.long(), g_len.long()
    by = float(scale) if masks else 1.0
    # Without ReLU, whose mask is the one given, the numbers of f and g are not read.
    return list(_ops.transducer_joint_backward(dh, f, g, *lengths, keep, offset, rows, False, by))
