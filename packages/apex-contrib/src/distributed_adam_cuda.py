"""Apex's extension module of DistributedFusedAdam: its positional signatures over this wheel's op.

Importable only where the kernels can run, because callers take the import as that answer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import apex.contrib.optimizers.distributed_adam as _op
from apex.contrib._ops import library

library.require_for_import(__name__, "distributed_adam")

__all__ = [
    "multi_tensor_fused_adam",
    "multi_tensor_fused_adam_capturable",
    "multi_tensor_fused_adam_with_param_remainders",
]


@torch.no_grad()
def multi_tensor_fused_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    grad_scale: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One Adam (``mode`` 0) or AdamW (1) step for lists ``[p_in, m, v, g, p_out]``.

    Gradients are multiplied by ``grad_scale``, float32. ``p_in`` is updated, and ``p_out`` receives
    it, cast. Each list is float32, float16 or bfloat16. The flag is ignored.
    """
    params, moments, grads, copies = _lists("multi_tensor_fused_adam", tensor_lists, 5)
    numbers = (beta1, beta2, eps, weight_decay, int(step), bool(bias_correction))
    _op.distributed_adam_step(
        params, grads, *moments, [], copies, None, None, None, None, grad_scale, None,
        float(lr), *numbers, _is_decoupled(mode),
    )  # fmt: skip


@torch.no_grad()
def multi_tensor_fused_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    grad_scale: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """:func:`multi_tensor_fused_adam` with ``lr``, float32, and ``step``, int32, on the device.

    Nothing is done where the flag is set.
    """
    params, moments, grads, copies = _lists("multi_tensor_fused_adam_capturable", tensor_lists, 5)
    numbers = (beta1, beta2, eps, weight_decay, 1, bool(bias_correction))
    _op.distributed_adam_step(
        params, grads, *moments, [], copies, None, None, lr, step, grad_scale,
        noop_flag.to(torch.float32), 0.0, *numbers, _is_decoupled(mode),
    )  # fmt: skip


@torch.no_grad()
def multi_tensor_fused_adam_with_param_remainders(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    grad_scale: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """:func:`multi_tensor_fused_adam` for lists ``[p_in, p_rem, m, v, g, p_out]``.

    A float32 parameter is the bfloat16 ``p_in``, which was rounded up where the int16 ``p_rem`` is
    negative, and ``p_rem``, its lower half. ``p_in`` and ``p_rem`` are updated, and ``p_out``,
    bfloat16, receives ``p_in``. The flag is ignored.
    """
    name = "multi_tensor_fused_adam_with_param_remainders"
    (params, remainders), moments, grads, copies = _lists(name, tensor_lists, 6)
    numbers = (beta1, beta2, eps, weight_decay, int(step), bool(bias_correction))
    _op.distributed_adam_step(
        params, grads, *moments, remainders, copies, None, None, None, None, grad_scale, None,
        float(lr), *numbers, _is_decoupled(mode),
    )  # fmt: skip


def _lists(name: str, lists: list[list[Tensor]], count: int) -> Any:
    """Parameters (with remainders, if there are six lists), moments, gradients and copies."""
    if len(lists) != count:
        raise RuntimeError(f"{name}: tensor_lists must hold {count} lists, got {len(lists)}.")
    *params, m, v, grads, copies = map(list, lists)
    return params if len(params) > 1 else params[0], (m, v), grads, copies


def _is_decoupled(mode: int) -> bool:
    if mode not in (0, 1):
        raise RuntimeError(f"mode must be 0 (Adam) or 1 (AdamW), got {mode}.")
    return mode == 1
