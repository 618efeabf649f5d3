"""Apex's extension module of group batch norm: its positional signatures over our functions.

Importable only where the kernels can run, because callers take the import as that answer. Nothing
here has a gradient. ``x`` is ``[N, C, H, W]``; vectors are ``[C]``. Ranks of a group exchange sums
through ``torch.distributed``, so that ``rank_id`` and ``peer_buffers`` are not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apex.contrib._ops import library
from apex.contrib._shared.native.operands import statistics_dtype as _statistics_dtype
from apex.contrib.group_batch_norm import over_group as _function

library.require_for_import(__name__, "group_batch_norm")

__all__ = ["backward", "forward"]


def forward(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    minibatch_mean: Tensor,
    minibatch_inv_var: Tensor,
    momentum: float,
    eps: float,
    bn_group: int,
    rank_id: int,
    peer_buffers: Any,
) -> Tensor:
    """Normalize ``x`` by the statistics of the group's batches.

    It updates the running statistics, and writes mean and ``1 / sqrt(var + eps)`` of the batches
    to ``minibatch_mean`` and ``minibatch_inv_var``.
    """
    name = "cudnn_gbn_lib.forward"
    group = _function.group_of(f"{name}: bn_group", bn_group)
    given = scale, bias, running_mean, running_var, eps, momentum, True, False, group
    with torch.no_grad():
        rows = x.movedim(1, -1)
        y, mean, inv_std = _function.group_batch_norm(name, rows, None, *given)
        minibatch_mean.copy_(mean)
        minibatch_inv_var.copy_(inv_std)
    return y.movedim(-1, 1)


def backward(
    x: Tensor,
    dy: Tensor,
    scale: Tensor,
    minibatch_mean: Tensor,
    minibatch_inv_var: Tensor,
    eps: float,
    bn_group: int,
    rank_id: int,
    peer_buffers: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, scale and bias; the latter two of this rank's elements."""
    name = "cudnn_gbn_lib.backward"
    rows, of_rows = x.movedim(1, -1).contiguous(), dy.movedim(1, -1).contiguous()
    vectors = {"scale": scale, "minibatch_mean": minibatch_mean, "inv_var": minibatch_inv_var}
    _function.check(name, rows, of_rows, vectors)
    group = _function.group_of(f"{name}: bn_group", bn_group)
    dtype = _statistics_dtype(x.dtype)
    wide = [vector.to(dtype).contiguous() for vector in vectors.values()]
    with torch.no_grad():
        count = _function.rows_of_all(rows, group)
        dx, _, dscale, dbias = _function.gradients(of_rows, rows, *wide, count, None, group)
    return dx.movedim(-1, 1), dscale.to(scale.dtype), dbias.to(scale.dtype)
