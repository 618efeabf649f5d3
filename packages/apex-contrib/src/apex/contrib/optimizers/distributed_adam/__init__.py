"""The operators of DistributedFusedAdam's step: schemas, documentation and fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._ops import library

__all__ = ["distributed_adam_peaks", "distributed_adam_step"]

_NUMBERS = (
    "float lr, float beta1, float beta2, float eps, float weight_decay, int step, "
    "bool bias_correction, bool decoupled) -> "
)


@library.define(
    "distributed_adam_step(Tensor(a!)[] params, Tensor[] grads, Tensor(c!)[] exp_avgs, "
    "Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] remainders, Tensor(f!)[] copies, Tensor? scales, "
    "Tensor? new_scales, Tensor? device_lr, Tensor? device_step, Tensor? grad_scale, "
    "Tensor? found_inf, " + _NUMBERS + "()"
)
def distributed_adam_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    remainders: list[Tensor],
    copies: list[Tensor],
    scales: Tensor | None,
    new_scales: Tensor | None,
    device_lr: Tensor | None,
    device_step: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    bias_correction: bool,
    decoupled: bool,
) -> None:
    """One Adam step over fragments of parameters, in place; mathematics in float32.

    Lists have one length; tensor ``i`` of each list has the same number of elements and layout.
    Each list has one dtype: float32, float16 or bfloat16.

    Args:
        params: values that are updated.
        grads: read only.
        exp_avgs, exp_avg_sqs: the moments.
        remainders: empty; or int16, with bfloat16 ``params`` and ``copies``: the lower halves of
            float32 values whose upper halves ``params`` are, rounded with ties away from zero.
        copies: empty, or tensors that receive the new values, rounded.
        scales: float32 [len(params), 3], or None for 1: what the stored parameter, ``exp_avg`` and
            ``exp_avg_sq`` are multiplied by when they are read.
        new_scales: the same for what is written. Powers of two cause no rounding.
        device_lr: float32, one element; read instead of ``lr``.
        device_step: int32, one element; read instead of ``step``.
        grad_scale: float32, one element; gradients are multiplied by it. None is 1.
        found_inf: float32, one element; where it is not 0 nothing is changed. None is 0.
        step: 1 for the first step.
        bias_correction: divide the moments by ``1 - beta**step``.
        decoupled: AdamW; else the decay is added to the gradient.

    Raises:
        RuntimeError: lists, dtypes, devices or layouts do not match, ``step`` is below 1, a beta is
            outside [0, 1), or ``eps`` is negative; nothing is changed then.

    Source:
        Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2; sharded states after
        Rajbhandari et al., *ZeRO*, SC 2020, stage 2.
    """


@library.define(
    "distributed_adam_peaks(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, "
    "Tensor[] exp_avg_sqs, Tensor? scales, Tensor? device_lr, Tensor? device_step, "
    "Tensor? grad_scale, " + _NUMBERS + "Tensor"
)
def distributed_adam_peaks(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    scales: Tensor | None,
    device_lr: Tensor | None,
    device_step: Tensor | None,
    grad_scale: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    bias_correction: bool,
    decoupled: bool,
) -> Tensor:
    """The largest magnitudes that parameters and moments will have after a step.

    Arguments and errors are those of :func:`distributed_adam_step`; nothing is changed.

    Returns:
        float64 [len(params), 3]: of the parameter, ``exp_avg`` and ``exp_avg_sq`` of each fragment,
        inf and NaN left out.
    """
    return params[0].new_empty(len(params), 3, dtype=torch.float64)
