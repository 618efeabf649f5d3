"""The adam_step operators: schemas, documentation and fake kernels."""

from __future__ import annotations

from torch import Tensor

from .._ops import library

_LISTS = (
    "Tensor(a!)[] params, Tensor{grads}[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
    "Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] masters, "
)


@library.define(
    "adam_step(" + _LISTS.format(grads="") + "float lr, float beta1, float beta2, float eps, "
    "float weight_decay, int step, bool bias_correction, bool decoupled, "
    "bool maximize=False, Tensor? clip=None, int? rounding_key=None) -> ()"
)
def adam_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    bias_correction: bool,
    decoupled: bool,
    maximize: bool = False,
    clip: Tensor | None = None,
    rounding_key: int | None = None,
) -> None:
    """One Adam step over lists of tensors, in place.

    Lists have one length; tensor ``i`` of each list has the same number of elements and layout.

    Args:
        params: float64, float32, float16 or bfloat16, all of one dtype and device.
        grads: of the parameters' dtype; read only.
        exp_avgs, exp_avg_sqs: float32 (for float64 parameters also float64).
        max_exp_avg_sqs: empty; or for AMSGrad the largest ``exp_avg_sqs`` so far, of their dtype
            (float64 for float64 parameters), which are used in their place.
        masters: empty, or float32 values that are updated instead of ``params``, which then receive
            them rounded. With ``max_exp_avg_sqs`` only for ``params`` of 16 bits.
        step: 1 for the first step.
        bias_correction: divide the moments by ``1 - beta**step``.
        decoupled: AdamW; else the decay is added to the gradient.
        maximize: use the negative gradient.
        clip: float64, one element on the parameters' device. Gradients are used as if they had been
            multiplied by it and stored; they are not changed. None is 1.
        rounding_key: 64 bits; bfloat16 ``params`` are rounded up or down by chance then. Chances
            are bits of Philox4x32-10 by this key, the element's index, ``step``, and the tensor's
            number among those that have elements. None: to the nearest.

    Raises:
        RuntimeError: lists, dtypes, devices or layouts do not match, ``step`` is below 1, a beta is
            outside [0, 1), ``eps`` is negative, or there is a ``rounding_key`` with masters or for
            other dtypes; nothing is changed then.

    Source:
        Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2; Reddi, Kale & Kumar
        2018, algorithm 2 (AMSGrad).
    """


@library.define(
    "adam_step_capturable(" + _LISTS.format(grads="(b!)") + "Tensor lr, Tensor step, "
    "Tensor? inv_scale, Tensor? found_inf, float beta1, float beta2, float eps, "
    "float weight_decay, bool bias_correction, bool decoupled, "
    "bool maximize=False, Tensor? clip=None, int? rounding_key=None) -> ()"
)
def adam_step_capturable(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    lr: Tensor,
    step: Tensor,
    inv_scale: Tensor | None,
    found_inf: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    decoupled: bool,
    maximize: bool = False,
    clip: Tensor | None = None,
    rounding_key: int | None = None,
) -> None:
    """:func:`adam_step` whose changing numbers live on the device, for CUDA graphs.

    Args:
        lr: float32 ``[1]`` or 0-d.
        step: int32 ``[1]``; the step being taken, 1 for the first.
        inv_scale: float32; gradients are multiplied by it and written back. None is 1.
        found_inf: float32; where it is not 0 nothing is changed. None is 0.
    """
