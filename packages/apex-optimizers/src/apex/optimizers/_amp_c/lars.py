"""multi_tensor_lars."""

from __future__ import annotations

import torch
from torch import Tensor

from .._shared.native.writes import call_counted
from ..fused_lars.ops import lars_step
from .lists import Lists, checked_lists


@torch.no_grad()
def multi_tensor_lars(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    grad_norms: Tensor,
    param_norms: Tensor,
    lr: float,
    trust_coefficient: float,
    eps: float,
    weight_decay: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
    is_skipped: bool,
) -> None:
    """One LARS step for lists ``[grads, params, momentum_buffers]``, or with 16-bit copies.

    ``grad_norms`` and ``param_norms`` [number of tensors] are the norms of the tensors in the
    lists; ``is_skipped`` takes no norms. Gradients, and their norms, are multiplied by ``scale``.
    ``dampening``, ``first_run`` and ``wd_after_momentum`` have no effect: buffers start as zeros.
    With a fourth list, ``params`` are float32 and their new values also go, rounded, to that list
    of float16 or bfloat16. Nothing is done where the flag is set. See
    :func:`apex.optimizers.fused_lars.ops.lars_step`.
    """
    names = ("grads", "params", "momentum_buffers", "copies")
    names = names if len(tensor_lists) == 4 else names[:3]
    grads, params, buffers, *copies = checked_lists("multi_tensor_lars", tensor_lists, names)
    if not params:
        return
    dtype = torch.float64 if params[0].dtype == torch.float64 else torch.float32
    call_counted(
        lars_step,
        params,
        grads,
        buffers if momentum != 0 else [],
        copies[0] if copies else [],
        None if is_skipped else grad_norms.to(dtype),
        None if is_skipped else param_norms.to(dtype),
        float(lr),
        None,
        float(trust_coefficient),
        float(eps),
        float(momentum),
        float(weight_decay),
        bool(nesterov),
        False,
        float(scale),
        noop_flag,
    )
