"""multi_tensor_adam and its forms for CUDA graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from .._shared.native.writes import call_counted
from ..fused_adam.ops import adam_step, adam_step_capturable
from .lists import Lists, checked_lists


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One Adam (``mode`` 0) or AdamW (1) step for lists ``[grads, params, exp_avgs, exp_avg_sqs]``.

    The moments are float32 (for float64 parameters also float64). The flag is ignored. See
    :func:`apex.optimizers.fused_adam.ops.adam_step`.
    """
    names = ("grads", "params", "exp_avgs", "exp_avg_sqs")
    grads, params, exp_avgs, exp_avg_sqs = checked_lists("multi_tensor_adam", tensor_lists, names)
    if not params:
        return
    call_counted(
        adam_step,
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [],
        float(lr),
        beta1,
        beta2,
        eps,
        weight_decay,
        int(step),
        bool(bias_correction),
        _is_decoupled(mode),
    )


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """:func:`multi_tensor_adam` whose changing numbers are tensors on the device.

    ``lr`` and ``inv_scale`` are float32, ``step`` is int32. Gradients are multiplied by
    ``inv_scale`` and written back. Nothing is done where the flag is set. See
    :func:`apex.optimizers.fused_adam.ops.adam_step_capturable`.
    """
    names = ("grads", "params", "exp_avgs", "exp_avg_sqs")
    lists = checked_lists("multi_tensor_adam_capturable", tensor_lists, names)
    numbers = (beta1, beta2, eps, weight_decay, bool(bias_correction), _is_decoupled(mode))
    _capturable([*lists, []], noop_flag, lr, step, inv_scale, numbers)


@torch.no_grad()
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """:func:`multi_tensor_adam_capturable` with a fifth list of float32 masters, which are updated
    instead of the parameters and then rounded into them.
    """
    names = ("grads", "params", "exp_avgs", "exp_avg_sqs", "masters")
    lists = checked_lists("multi_tensor_adam_capturable_master", tensor_lists, names)
    numbers = (beta1, beta2, eps, weight_decay, bool(bias_correction), _is_decoupled(mode))
    _capturable(lists, noop_flag, lr, step, inv_scale, numbers)


def _capturable(
    lists: list[list[Tensor]],
    noop_flag: Tensor,
    lr: Tensor,
    step: Tensor,
    inv_scale: Tensor,
    numbers: tuple,
) -> None:
    grads, params, exp_avgs, exp_avg_sqs, masters = lists
    if params:
        found_inf = noop_flag.to(torch.float32)
        moments = (exp_avgs, exp_avg_sqs)
        call_counted(
            adam_step_capturable,
            params,
            grads,
            *moments,
            [],
            masters,
            lr,
            step,
            inv_scale,
            found_inf,
            *numbers,
        )


def _is_decoupled(mode: int) -> bool:
    if mode not in (0, 1):
        raise RuntimeError(f"mode must be 0 (Adam) or 1 (AdamW), got {mode}.")
    return mode == 1
