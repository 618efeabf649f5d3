"""multi_tensor_lamb, its form with numbers on the device, and its two stages."""

from __future__ import annotations

import torch
from torch import Tensor

from .._shared.native.writes import call_counted
from ..fused_lamb.ops import lamb_stage1, lamb_stage2, lamb_step
from .lists import Lists, checked_lists

_NAMES = ("grads", "params", "exp_avgs", "exp_avg_sqs")


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool | None = None,
) -> None:
    """One LAMB step for lists ``[grads, params, exp_avgs, exp_avg_sqs]``.

    ``mode`` 1 is decoupled decay, 0 adds it to the gradient. The moments are float32 or of the
    parameters' dtype. Gradients are left as they are; ``max_grad_norm`` 0 does not clip. The flag
    is ignored. See :func:`apex.optimizers.fused_lamb.ops.lamb_step`.
    """
    grads, params, exp_avgs, exp_avg_sqs = checked_lists("multi_tensor_lamb", tensor_lists, _NAMES)
    if not params:
        return
    call_counted(
        lamb_step,
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        float(lr),
        None,
        beta1,
        beta2,
        eps,
        weight_decay,
        int(step),
        None,
        bool(bias_correction),
        bool(grad_averaging),
        _is_decoupled(mode),
        bool(use_nvlamb),
        False,
        _norm_near(global_grad_norm, params[0]),
        float(max_grad_norm),
        None,
        None,
        None,
    )


@torch.no_grad()
def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: Tensor,
    use_nvlamb: bool | None,
    found_inf: Tensor,
    inv_scale: Tensor,
) -> None:
    """:func:`multi_tensor_lamb` whose changing numbers are tensors on the device.

    With a fifth list, parameters and moments are float32, and the new parameters also go, rounded,
    to that list of float16 or bfloat16. Norm and limit are those of the gradients before they are
    multiplied by ``inv_scale``: give the limit times the loss scale. Nothing is done where
    ``found_inf`` or the flag is set.
    """
    names = (*_NAMES, "copies") if len(tensor_lists) == 5 else _NAMES
    lists = checked_lists("multi_tensor_lamb_mp", tensor_lists, names)
    grads, params, exp_avgs, exp_avg_sqs, *copies = lists
    if not params:
        return
    like = params[0]
    call_counted(
        lamb_step,
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        copies[0] if copies else [],
        0.0,
        _number_near(lr, like),
        beta1,
        beta2,
        eps,
        weight_decay,
        0,
        _number_near(step, like, torch.int32),
        bool(bias_correction),
        bool(grad_averaging),
        _is_decoupled(mode),
        bool(use_nvlamb),
        False,
        _norm_near(global_grad_norm, like),
        0.0,
        _number_near(max_grad_norm, like),
        _number_near(inv_scale, like),
        _is_any_set(noop_flag, found_inf, like),
    )


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    per_tensor_decay: Tensor,
    step: int,
    beta1: float,
    beta2: float,
    eps: float,
    global_grad_norm: Tensor,
    max_grad_norm: float,
) -> None:
    """LAMB's updates for lists ``[grads, params, exp_avgs, exp_avg_sqs, updates]``.

    ``step`` counts the steps before this one, as in Apex: 0 for the first. ``per_tensor_decay``
    [n] is the weight decay of each tensor. ``global_grad_norm`` may be on any device. See
    :func:`apex.optimizers.fused_lamb.ops.lamb_stage1`.
    """
    names = (*_NAMES, "updates")
    lists = checked_lists("multi_tensor_lamb_stage1_cuda", tensor_lists, names)
    if not lists[0]:
        return
    like = lists[1][0]
    call_counted(
        lamb_stage1,
        *lists,
        _number_near(per_tensor_decay, like),
        beta1,
        beta2,
        eps,
        int(step) + 1,
        _norm_near(global_grad_norm, like),
        float(max_grad_norm),
    )


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    lr: float,
    weight_decay: float,
    use_nvlamb: bool | None = None,
) -> None:
    """Takes the updates of stage 1, scaled by the ratio of norms, for lists ``[params, updates]``.

    Norms [n] are those that :func:`multi_tensor_l2norm` gives per tensor. See
    :func:`apex.optimizers.fused_lamb.ops.lamb_stage2`.
    """
    params, updates = checked_lists(
        "multi_tensor_lamb_stage2_cuda", tensor_lists, ("params", "updates")
    )
    if not params:
        return
    norms = (
        _number_near(norm, params[0], torch.float64)
        for norm in (per_tensor_param_norm, per_tensor_update_norm)
    )
    call_counted(
        lamb_stage2, params, updates, *norms, float(lr), float(weight_decay), bool(use_nvlamb)
    )


def _number_near(
    number: Tensor | float, like: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.as_tensor(number, dtype=dtype, device=like.device).contiguous()


def _norm_near(norm: Tensor, like: Tensor) -> Tensor:
    wide = isinstance(norm, Tensor) and norm.dtype == torch.float64
    return _number_near(norm, like, torch.float64 if wide else torch.float32)


def _is_any_set(noop_flag: Tensor, found_inf: Tensor, like: Tensor) -> Tensor:
    flags = [_number_near(flag, like).reshape(1) for flag in (noop_flag, found_inf)]
    return (flags[0] != 0).logical_or(flags[1] != 0).float()


def _is_decoupled(mode: int) -> bool:
    if mode not in (0, 1):
        raise RuntimeError(f"mode must be 0 (L2 regularisation) or 1 (decoupled), got {mode}.")
    return mode == 1
