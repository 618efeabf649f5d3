"""The operators of Adam with small states: schemas, documentation and fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import library

__all__ = ["adam_compact_peaks", "adam_step_compact"]


@library.define(
    "adam_step_compact(Tensor(a!)[] params, Tensor[] grads, Tensor(c!)[] exp_avgs, "
    "Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] masters, Tensor? scales, Tensor? new_scales, float lr, "
    "float beta1, float beta2, float eps, float weight_decay, int step, bool bias_correction, "
    "bool decoupled, float gradient_scale=1.0) -> ()"
)
def adam_step_compact(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    scales: Tensor | None,
    new_scales: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    bias_correction: bool,
    decoupled: bool,
    gradient_scale: float = 1.0,
) -> None:
    """One Adam step over lists of tensors with small states, in place; mathematics in float32.

    Lists have one length; tensor ``i`` of each list has the same number of elements and layout.

    Args:
        params: float32, float16 or bfloat16, all of one dtype and device.
        grads: float32, float16 or bfloat16, whatever the parameters' dtype; read only.
        exp_avgs, exp_avg_sqs: float32, float16, bfloat16 or float8_e4m3fn, each list of one dtype.
        masters: empty; or float32 values, or float16 ones of 16-bit ``params``, that are updated
            instead of ``params``, which then receive what is stored, rounded; or int16, with
            bfloat16 ``params``: the lower half of a float32 master. The parameter is the master's
            upper half, plus one unit where the remainder is negative.
        scales: float32 [len(params), 3], or None for 1: the stored ``exp_avg``, ``exp_avg_sq`` and
            float16 master are multiplied by it when they are read.
        new_scales: the same for the values that are written. Powers of two cause no rounding.
        step: 1 for the first step.
        bias_correction: divide the moments by ``1 - beta**step``.
        decoupled: AdamW; else the decay is added to the gradient.
        gradient_scale: gradients are multiplied by it; negative to maximize.

    Raises:
        RuntimeError: lists, dtypes, devices or layouts do not match, ``step`` is below 1, a beta is
            outside [0, 1), or ``eps`` is negative; nothing is changed then.

    Source:
        Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2; scales per tensor
        after Dettmers et al., *8-bit Optimizers via Block-wise Quantization*, ICLR 2022.
    """


@library.define(
    "adam_compact_peaks(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, "
    "Tensor[] masters, Tensor? scales, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, int step, bool bias_correction, bool decoupled, "
    "float gradient_scale=1.0) -> Tensor"
)
def adam_compact_peaks(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    scales: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    bias_correction: bool,
    decoupled: bool,
    gradient_scale: float = 1.0,
) -> Tensor:
    """The largest magnitudes that states will have after a step; nothing is changed.

    The arguments are those of :func:`adam_step_compact`, and all lists must match, as it wants
    them. ``masters`` are read only if they are float16, and ``params`` only if they are not, for a
    decay that goes into gradients.

    Returns:
        float64 [len(grads), 2]: of ``exp_avg`` and ``exp_avg_sq`` of each tensor; with float16
        masters [len(grads), 3]: of these, too. inf and NaN are left out.
    """
    columns = 3 if masters and masters[0].dtype == torch.float16 else 2
    return grads[0].new_empty(len(grads), columns, dtype=torch.float64)
