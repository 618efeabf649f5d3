"""multi_tensor_l2norm and its relatives."""

from __future__ import annotations

import torch
from torch import Tensor

from apex.multi_tensor_apply.multi_tensor_l2norm import multi_tensor_l2norm as _l2norm
from apex.multi_tensor_apply.multi_tensor_l2norm_scale import (
    multi_tensor_l2norm_scale as _l2norm_scale,
)

from .._shared.native.writes import call_counted
from .lists import Lists, checked_lists


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Euclidean norm of lists ``[x]``: all elements [1], and per tensor [n], or [0] if not asked.

    See :func:`apex.multi_tensor_apply.multi_tensor_l2norm`.
    """
    (inputs,) = checked_lists("multi_tensor_l2norm", tensor_lists, ("x",))
    if not inputs:
        return _norm_of_nothing(noop_flag)
    return call_counted(_l2norm, inputs, noop_flag, bool(per_tensor))


@torch.no_grad()
def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`multi_tensor_l2norm`, also where the flag is set already.

    Apex leaves the results undefined there; reading the flag would cost a synchronisation.
    """
    (inputs,) = checked_lists("multi_tensor_l2norm_mp", tensor_lists, ("x",))
    if not inputs:
        return _norm_of_nothing(noop_flag)
    return call_counted(_l2norm, inputs, noop_flag, bool(per_tensor))


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    scale: float,
    per_tensor: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """``out = in * scale`` for lists ``[in, out]``, and the norm of ``in`` before scaling.

    See :func:`apex.multi_tensor_apply.multi_tensor_l2norm_scale`.
    """
    names = ("in", "out")
    inputs, outputs = checked_lists("multi_tensor_l2norm_scale", tensor_lists, names)
    if not inputs:
        return _norm_of_nothing(noop_flag)
    return _l2norm_scale(inputs, outputs, noop_flag, float(scale), bool(per_tensor))


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    inv_scale: Tensor,
    per_tensor: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Norm of ``x * inv_scale`` for lists ``[x]``, which stay unchanged.

    ``inv_scale`` has one element, on the device of the tensors; it is not waited for.
    """
    (inputs,) = checked_lists("multi_tensor_unscale_l2norm", tensor_lists, ("x",))
    if not inputs:
        return _norm_of_nothing(noop_flag)
    factor = inv_scale.reshape(1).abs()
    norm, norms = call_counted(_l2norm, inputs, noop_flag, bool(per_tensor))
    return norm * factor, norms * factor


def _norm_of_nothing(noop_flag: Tensor) -> tuple[Tensor, Tensor]:
    norm = torch.zeros(1, dtype=torch.float32, device=noop_flag.device)
    return norm, norm.new_empty(0)
