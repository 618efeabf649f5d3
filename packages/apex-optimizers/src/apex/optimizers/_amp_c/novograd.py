"""multi_tensor_novograd."""

from __future__ import annotations

import torch
from torch import Tensor

from .._shared.native.writes import call_counted
from ..fused_novograd.ops import novograd_step
from .lists import Lists, checked_lists


@torch.no_grad()
def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    moment_mode: int,
    norm_type: int,
) -> None:
    """One NovoGrad step for lists ``[grads, params, exp_avgs]``.

    ``grad_norms`` [number of tensors], float32, are the running norms: first the norms of these
    gradients (``norm_type`` 2, or 0 for the largest absolute value) are blended into them.
    ``moment_mode`` 0 puts normalization and decay into the moment, 1 after it. Moments are float32,
    or of the parameters' dtype. Gradients are not overwritten; the flag is ignored. See
    :func:`apex.optimizers.fused_novograd.ops.novograd_step`.
    """
    name = "multi_tensor_novograd"
    grads, params, exp_avgs = checked_lists(name, tensor_lists, ("grads", "params", "exp_avgs"))
    if moment_mode not in (0, 1):
        raise RuntimeError(f"{name}: moment_mode must be 0 (inside) or 1, got {moment_mode}.")
    if norm_type not in (0, 2):
        raise RuntimeError(f"{name}: norm_type must be 2, or 0 (maximum), got {norm_type}.")
    if params:
        call_counted(
            novograd_step,
            params,
            grads,
            exp_avgs,
            grad_norms,
            float(lr),
            beta1,
            beta2,
            eps,
            weight_decay,
            int(step),
            bool(bias_correction),
            bool(grad_averaging),
            moment_mode == 0,
            norm_type == 0,
            False,
            False,
        )
