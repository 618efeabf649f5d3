"""Apex's extension module of batch norm: its positional signatures over this wheel's functions.

Importable only where the kernels can run, because callers take the import as that answer. Nothing
here has a gradient. Tensors are ``[N, H, W, C]``; ``scale``, ``bias``, ``running_mean`` and
``running_var`` are ``[C]``. Training functions update the running statistics, and write mean and
``1 / sqrt(var + eps)`` of the batch to ``mb_mean`` and ``mb_inv_var``.

Ranks of a group exchange sums through ``torch.distributed``, so that pointers to other processes'
memory, launch sizes and ``magic`` are taken and not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apex.contrib._ops import library
from apex.contrib._shared.native.operands import statistics_dtype as _statistics_dtype
from apex.contrib.group_batch_norm import ops as _ops
from apex.contrib.group_batch_norm import over_group as _function

library.require_for_import(__name__, "group_batch_norm")

__all__ = [
    "bn_addrelu_bwd_nhwc",
    "bn_addrelu_bwd_nhwc_occupancy",
    "bn_addrelu_fwd_eval_nhwc",
    "bn_addrelu_fwd_nhwc",
    "bn_addrelu_fwd_nhwc_occupancy",
    "bn_bwd_nhwc",
    "bn_bwd_nhwc_occupancy",
    "bn_fwd_eval_nhwc",
    "bn_fwd_nhwc",
    "bn_fwd_nhwc_occupancy",
    "close_remote_data",
    "get_buffer_size",
    "get_data_ptr",
    "get_remote_data_ptr",
]


def bn_fwd_nhwc(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    mb_mean: Tensor,
    mb_inv_var: Tensor,
    ret_cta: Any,
    momentum: float,
    eps: float,
    fuse_relu: bool,
    my_data: Any,
    pair_data: Any,
    pair_data2: Any,
    pair_data3: Any,
    bn_group: int,
    magic: Any,
    occupancy: Any,
    grid_x: Any,
    coop: Any,
) -> Tensor:
    """Normalize ``x`` by the statistics of the group's batches."""
    given = x, None, scale, bias, running_mean, running_var, mb_mean, mb_inv_var
    return _forward("bn_fwd_nhwc", *given, momentum, eps, fuse_relu, bn_group)


def bn_addrelu_fwd_nhwc(
    x: Tensor,
    z: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    mb_mean: Tensor,
    mb_inv_var: Tensor,
    bitmask: Tensor,
    ret_cta: Any,
    momentum: float,
    eps: float,
    my_data: Any,
    pair_data: Any,
    pair_data2: Any,
    pair_data3: Any,
    bn_group: int,
    magic: Any,
    occupancy: Any,
    grid_x: Any,
    coop: Any,
) -> Tensor:
    """The same, with ``z`` added and the positive part taken.

    ``bitmask`` is int32 with at least a bit for each element: 1 where the output is positive.
    """
    given = x, z, scale, bias, running_mean, running_var, mb_mean, mb_inv_var
    y = _forward("bn_addrelu_fwd_nhwc", *given, momentum, eps, True, bn_group)
    bits = (y > 0).flatten()
    words = -(-bits.numel() // 32)
    if bitmask.dtype != torch.int32 or bitmask.numel() < words or not bitmask.is_contiguous():
        raise ValueError(
            f"bn_addrelu_fwd_nhwc: bitmask must be contiguous int32 of at least {words} elements, "
            f"a bit for each element of x; got {bitmask.dtype} {list(bitmask.shape)}."
        )
    padded = torch.nn.functional.pad(bits, (0, 32 * words - bits.numel())).view(words, 32)
    weights = 1 << torch.arange(32, device=x.device)
    bitmask.view(-1)[:words] = (padded * weights).sum(1).to(torch.int32)
    return y


def bn_fwd_eval_nhwc(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    ret_cta: Any,
    bn_group: int,
    momentum: float,
    eps: float,
    fuse_relu: bool,
) -> Tensor:
    """Normalize ``x`` by the running statistics."""
    given = x, None, scale, bias, running_mean, running_var, eps
    return _evaluate("bn_fwd_eval_nhwc", *given, fuse_relu)


def bn_addrelu_fwd_eval_nhwc(
    x: Tensor,
    z: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    ret_cta: Any,
    bn_group: int,
    momentum: float,
    eps: float,
) -> Tensor:
    """The same, with ``z`` added and the positive part taken."""
    given = x, z, scale, bias, running_mean, running_var, eps
    return _evaluate("bn_addrelu_fwd_eval_nhwc", *given, True)


def bn_bwd_nhwc(
    x: Tensor,
    dy: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    mb_mean: Tensor,
    mb_inv_var: Tensor,
    ret_cta: Any,
    momentum: float,
    eps: float,
    fuse_relu: bool,
    my_data: Any,
    pair_data: Any,
    pair_data2: Any,
    pair_data3: Any,
    bn_group: int,
    magic: Any,
    occupancy: Any,
    grid_x: Any,
    coop: Any,
) -> list[Tensor]:
    """Gradients of x, scale and bias; the latter two of this rank's elements."""
    y = None
    if fuse_relu:
        y = _ops.forward(x, None, mb_mean, mb_inv_var, *_wide(x, scale, bias), True)
    dx, _, *others = _backward("bn_bwd_nhwc", x, dy, scale, mb_mean, mb_inv_var, y, bn_group)
    return [dx, *others]


def bn_addrelu_bwd_nhwc(
    x: Tensor,
    dy: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    mb_mean: Tensor,
    mb_inv_var: Tensor,
    bitmask: Tensor,
    ret_cta: Any,
    momentum: float,
    eps: float,
    my_data: Any,
    pair_data: Any,
    pair_data2: Any,
    pair_data3: Any,
    bn_group: int,
    magic: Any,
    occupancy: Any,
    grid_x: Any,
    coop: Any,
) -> list[Tensor]:
    """Gradients of x, z, scale and bias, given the forward's ``bitmask``."""
    shifts = torch.arange(32, device=x.device)
    bits = (bitmask.flatten()[:, None] >> shifts) & 1
    y = bits.flatten()[: x.numel()].view(x.shape).to(x.dtype)
    return _backward("bn_addrelu_bwd_nhwc", x, dy, scale, mb_mean, mb_inv_var, y, bn_group)


def bn_fwd_nhwc_occupancy() -> int:
    """How many blocks Apex's kernels may run at once on a multiprocessor: 2, its default."""
    return 2


bn_bwd_nhwc_occupancy = bn_fwd_nhwc_occupancy
"""The same."""
bn_addrelu_fwd_nhwc_occupancy = bn_fwd_nhwc_occupancy
"""The same."""
bn_addrelu_bwd_nhwc_occupancy = bn_fwd_nhwc_occupancy
"""The same."""


def get_buffer_size(bn_sync_steps: int) -> int:
    """Bytes that callers allocate for the exchange with other ranks, which does not use them."""
    return 4 * max(1, int(bn_sync_steps))


def get_data_ptr(data: Tensor) -> int:
    """The address of a tensor's first element."""
    return data.data_ptr()


def get_remote_data_ptr(handle: Tensor, offset: int) -> int:
    """Raise: no other process' memory is opened here."""
    raise NotImplementedError(
        "bnp.get_remote_data_ptr: ranks exchange sums through torch.distributed; none opens memory "
        "of another. Pass None for my_data and pair_data, and bn_group for the ranks."
    )


def close_remote_data(handle: Tensor) -> None:
    """Do nothing: :func:`get_remote_data_ptr` opened nothing."""


def _wide(x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    dtype = _statistics_dtype(x.dtype)
    return tuple(vector.to(dtype).contiguous() for vector in vectors)


def _forward(
    name: str,
    x: Tensor,
    z: Tensor | None,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    mb_mean: Tensor,
    mb_inv_var: Tensor,
    momentum: float,
    eps: float,
    fuse_relu: bool,
    bn_group: int,
) -> Tensor:
    group = _function.group_of(f"{name}: bn_group", bn_group)
    given = x, z, scale, bias, running_mean, running_var, eps, momentum, True, fuse_relu, group
    with torch.no_grad():
        y, mean, inv_std = _function.group_batch_norm(name, *given)
        mb_mean.copy_(mean)
        mb_inv_var.copy_(inv_std)
    return y


def _evaluate(
    name: str,
    x: Tensor,
    z: Tensor | None,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    eps: float,
    relu: bool,
) -> Tensor:
    given = x, z, scale, bias, running_mean, running_var, eps, 0.0, False, relu, None
    with torch.no_grad():
        return _function.group_batch_norm(name, *given)[0]


def _backward(
    name: str,
    x: Tensor,
    dy: Tensor,
    scale: Tensor,
    mean: Tensor,
    inv_std: Tensor,
    y: Tensor | None,
    bn_group: int,
) -> list[Tensor]:
    """Gradients of x, z, scale and bias."""
    _function.check(name, x, dy, {"scale": scale, "mb_mean": mean, "mb_inv_var": inv_std})
    group = _function.group_of(f"{name}: bn_group", bn_group)
    with torch.no_grad():
        count = _function.rows_of_all(x, group)
        given = dy.contiguous(), x, *_wide(x, scale, mean, inv_std), count, y, group
        dx, dz, *others = _function.gradients(*given)
    return [dx, dz, *(gradient.to(scale.dtype) for gradient in others)]
