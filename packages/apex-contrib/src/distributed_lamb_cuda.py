"""Apex's extension module of DistributedFusedLAMB: its positional signatures over this wheel's ops.

``chunk_size`` has no effect; ``noop_flag`` is int32 with one element, and nothing is done where it
is set. Importable only where the kernels can run, because callers take the import as that answer.
:class:`apex.contrib.optimizers.distributed_fused_lamb.DistributedFusedLAMB` itself takes both
stages in one operator, which keeps no updates in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex.contrib._ops import library
from apex.contrib._shared.native.writes import call_counted
from apex.contrib.optimizers import sharded_lamb as _ops
from apex.contrib.optimizers.given_lists import number_near as _number_near
from apex.contrib.optimizers.given_lists import raw_lists as _raw_lists

library.require_for_import(__name__, "sharded_lamb")

__all__ = ["multi_tensor_lamb_compute_update_term", "multi_tensor_lamb_update_weights"]


@torch.no_grad()
def multi_tensor_lamb_compute_update_term(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    per_tensor_beta1: Tensor,
    per_tensor_beta2: Tensor,
    per_tensor_beta3: Tensor,
    per_tensor_bias_correction: Tensor,
    step: Tensor,
    per_tensor_epsilon: Tensor,
    mode: int,
    per_tensor_decay: Tensor,
    global_scale: Tensor,
    global_grad_norm: Tensor,
    max_grad_norm: float,
) -> None:
    """Write LAMB's updates for lists ``[g, p, m, v, u]``; the moments are updated in place.

    Args:
        per_tensor_beta1, per_tensor_beta2, per_tensor_epsilon, per_tensor_decay: one number per
            tensor, or one for all.
        per_tensor_beta3: likewise: the weight of a gradient, ``1 - beta1`` or 1.
        per_tensor_bias_correction: likewise; not 0 divides the moments by ``1 - beta**step``.
        step: one number, 1 for the first step.
        mode: 1: the decay is part of the update; 0: of the gradient.
        global_scale: what gradients were multiplied by.
        global_grad_norm: the norm of all scaled gradients.
        max_grad_norm: gradients are multiplied by
            ``min(1, max_grad_norm / (global_grad_norm / global_scale + 1e-6))``; 0: they are not.

    g and p are float32, float16 or bfloat16; m, v and u are float32. Numbers are tensors on the
    device, for which nothing waits.
    """
    name = "multi_tensor_lamb_compute_update_term"
    if mode not in (0, 1):
        raise RuntimeError(f"{name}: mode must be 0 or 1, got {mode}.")
    lists = _raw_lists(name, tensor_lists, "g", "p", "m", "v", "u")
    if not lists[0]:
        return
    like, count = lists[1][0], len(lists[0])

    def per_tensor(argument: str, numbers: Tensor) -> Tensor:
        return _per_tensor(name, argument, numbers, like, count)

    beta1 = per_tensor("beta1", per_tensor_beta1)
    beta2 = per_tensor("beta2", per_tensor_beta2)
    is_corrected = per_tensor("bias_correction", per_tensor_bias_correction) != 0
    steps = _one(step, like)
    one = torch.ones_like(beta1)
    corrections = (torch.where(is_corrected, 1 - beta**steps, one) for beta in (beta1, beta2))
    columns = [
        *(beta1, beta2, per_tensor("beta3", per_tensor_beta3), 1 - beta2),
        *(1 / correction for correction in corrections),
        per_tensor("epsilon", per_tensor_epsilon),
        per_tensor("decay", per_tensor_decay),
    ]
    scale = _one(global_scale, like)
    clip = torch.ones_like(scale)
    if max_grad_norm > 0:
        clip = (max_grad_norm / (_one(global_grad_norm, like) / scale + 1e-6)).clamp(max=1)
    flag = _number_near(noop_flag, like, torch.int32)
    numbers = torch.stack(columns, 1).contiguous()
    call_counted(_ops.lamb_terms, *lists, numbers, clip / scale, mode == 1, flag)


@torch.no_grad()
def multi_tensor_lamb_update_weights(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    update_norm_offset: Tensor,
    learning_rate: Tensor,
    per_tensor_decay: Tensor,
    global_grad_norm: Tensor,
    use_nvlamb: bool,
) -> None:
    """Take the updates for lists ``[u, p, p_copy]``: ``p -= lr * ratio * u``, also to ``p_copy``.

    Args:
        per_tensor_param_norm: one number per tensor.
        per_tensor_update_norm, update_norm_offset: the norm of update ``i`` is
            ``per_tensor_update_norm[update_norm_offset[i]]``.
        learning_rate: one number.
        per_tensor_decay: one number per tensor, or one for all; where it is 0 and not
            ``use_nvlamb`` the ratio is 1.
        global_grad_norm: nothing is done where it is not finite.

    u and p are float32; p_copy is float32, float16, bfloat16 or uint8, which are the upper bytes of
    float16 numbers.
    """
    name = "multi_tensor_lamb_update_weights"
    updates, params, copies = _raw_lists(name, tensor_lists, "u", "p", "p_copy")
    if not params:
        return
    like, count = params[0], len(params)
    offsets = update_norm_offset.reshape(-1).to(like.device, torch.int64)
    of_updates = _number_near(per_tensor_update_norm, like, torch.float64)[offsets]
    norms = [
        _per_tensor(name, argument, numbers, like, count)
        for argument, numbers in (
            ("param_norm", per_tensor_param_norm),
            ("update_norm", of_updates),
            ("decay", per_tensor_decay),
        )
    ]
    is_off = ~_one(global_grad_norm, like).isfinite()
    is_off |= _number_near(noop_flag, like, torch.int32) != 0
    lr = _number_near(learning_rate, like, torch.float32)
    lists = (params, updates, copies)
    call_counted(_ops.lamb_apply, *lists, *norms, lr, bool(use_nvlamb), is_off.int())


def _one(number: Tensor, like: Tensor) -> Tensor:
    return _number_near(number, like, torch.float64)


def _per_tensor(name: str, argument: str, numbers: Tensor, like: Tensor, count: int) -> Tensor:
    """``numbers`` as float64 ``[count]``; one stands for all."""
    numbers = _one(numbers, like)
    if numbers.numel() not in (1, count):
        raise RuntimeError(
            f"{name}: {argument} must have one number for each of {count} tensors, or one for all, "
            f"got {numbers.numel()}."
        )
    return numbers.expand(count).contiguous()
