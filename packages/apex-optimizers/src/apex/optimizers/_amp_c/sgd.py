"""multi_tensor_sgd."""

from __future__ import annotations

import torch
from torch import Tensor

from .._shared.native.writes import call_counted
from ..fused_sgd.ops import sgd_step
from .lists import Lists, checked_lists


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """One SGD step for lists ``[grads, params, momentum_buffers]``, or with 16-bit copies.

    With a fourth list, ``params`` are float32 and their new values also go, rounded, to that list
    of float16 or bfloat16. Gradients are multiplied by ``scale``. Nothing is done where the flag is
    set. See :func:`apex.optimizers.fused_sgd.ops.sgd_step`.
    """
    names = ("grads", "params", "momentum_buffers", "copies")
    names = names if len(tensor_lists) == 4 else names[:3]
    grads, params, buffers, *copies = checked_lists("multi_tensor_sgd", tensor_lists, names)
    if not params:
        return
    call_counted(
        sgd_step,
        params,
        grads,
        buffers if momentum != 0 else [],
        copies[0] if copies else [],
        float(lr),
        None,
        float(momentum),
        float(dampening),
        float(wd),
        bool(nesterov),
        bool(wd_after_momentum),
        bool(first_run),
        float(scale),
        noop_flag,
    )
