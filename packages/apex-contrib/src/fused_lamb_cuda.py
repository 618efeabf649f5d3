"""Apex's extension module of its first LAMB: a positional signature over this wheel's operator.

Importable only where the kernels can run, because callers take the import as that answer.
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

__all__ = ["lamb"]


@torch.no_grad()
def lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: float,
    max_grad_norm: float,
) -> None:
    """One LAMB step for lists ``[grads, params, exp_avgs, exp_avg_sqs]``.

    ``mode`` 1 is decoupled decay, 0 adds it to the gradient. ``global_grad_norm`` is a number, or a
    tensor with one, for which nothing waits. Gradients are left as they are. The flag and
    ``chunk_size`` have no effect. See :func:`apex.contrib.optimizers.sharded_lamb.lamb_step`.
    """
    if mode not in (0, 1):
        raise RuntimeError(f"fused_lamb_cuda.lamb: mode must be 0 or 1, got {mode}.")
    names = ("grads", "params", "exp_avgs", "exp_avg_sqs")
    grads, params, exp_avgs, exp_avg_sqs = _raw_lists("fused_lamb_cuda.lamb", tensor_lists, *names)
    if not params:
        return
    before = (float(lr), None, beta1, beta2, eps, weight_decay, int(step), None)
    flags = (bool(bias_correction), bool(grad_averaging), mode == 1, False)
    norm = _number_near(global_grad_norm, params[0], torch.float64)
    lists = (params, grads, exp_avgs, exp_avg_sqs, [])
    call_counted(_ops.lamb_step, *lists, *before, *flags, norm, float(max_grad_norm), None, None)
