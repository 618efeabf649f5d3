"""The operator of FusedAdamSWA's step: schema, documentation and fake kernel."""

from __future__ import annotations

from torch import Tensor

from ..._ops import library

__all__ = ["adam_swa_step"]


@library.define(
    "adam_swa_step(Tensor(a!)[] params, Tensor[] grads, Tensor(c!)[] exp_avgs, "
    "Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] copies, Tensor(f!)[] averages, Tensor? device_scale, "
    "float grad_scale, float lr, float beta1, float beta2, float eps, float weight_decay, "
    "int step, bool bias_correction, bool decoupled, float average_weight) -> ()"
)
def adam_swa_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
    averages: list[Tensor],
    device_scale: Tensor | None,
    grad_scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    bias_correction: bool,
    decoupled: bool,
    average_weight: float,
) -> None:
    """One Adam step over lists of tensors, their rounded copies and their averages, in place.

    Lists have one length; tensor ``i`` of each list has the same number of elements and layout.

    Args:
        params, exp_avgs, exp_avg_sqs, averages: all float32, or all float64, which is what is
            computed in.
        grads: read only; float32, float16 or bfloat16, or float64 for float64 ``params``.
        copies: receive the new parameters, rounded; dtypes as of ``grads``.
        device_scale: float64, one element; gradients are multiplied by it too. None is 1.
        grad_scale: gradients are multiplied by it.
        step: 1 for the first step.
        bias_correction: divide the moments by ``1 - beta**step``.
        decoupled: AdamW; else the decay is added to the gradient.
        average_weight: ``average += average_weight * (param - average)``, with the new ``param``;
            1 sets the average to it, whatever it was.

    Raises:
        RuntimeError: lists, dtypes, devices or layouts do not match, ``step`` is below 1, a beta is
            outside [0, 1), ``eps`` is negative, or ``average_weight`` is outside [0, 1]; nothing is
            changed then.

    Source:
        Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2; Izmailov et al. 2018,
        section 3.2, with a constant decay.
    """
