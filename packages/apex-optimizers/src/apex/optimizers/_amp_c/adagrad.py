"""multi_tensor_adagrad."""

from __future__ import annotations

import torch
from torch import Tensor

from .._shared.native.writes import call_counted
from ..fused_adagrad.ops import adagrad_step
from .lists import Lists, checked_lists


@torch.no_grad()
def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    eps: float,
    mode: int,
    weight_decay: float,
) -> None:
    """One Adagrad step for lists ``[grads, params, sums]``, with L2 (``mode`` 0) or decoupled decay
    (1).

    The sums are float32, or of the parameters' dtype. Gradients are not overwritten; the flag is
    ignored. See :func:`apex.optimizers.fused_adagrad.ops.adagrad_step`.
    """
    names = ("grads", "params", "sums")
    grads, params, sums = checked_lists("multi_tensor_adagrad", tensor_lists, names)
    if mode not in (0, 1):
        raise RuntimeError(
            f"multi_tensor_adagrad: mode must be 0 (L2) or 1 (decoupled decay), got {mode}."
        )
    if params:
        numbers = (float(lr), float(eps), float(weight_decay))
        call_counted(adagrad_step, params, grads, sums, *numbers, mode == 1, False)
