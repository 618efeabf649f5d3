"""The operators of Apex's first Adam: schemas, documentation and fake kernels."""

from __future__ import annotations

from torch import Tensor

from ..._ops import library

__all__ = ["cast_unless", "scaled_adam_step", "scaled_adam_undo"]

_LISTS = "Tensor(a!)[] params, Tensor[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
_NUMBERS = "float lr, float beta1, float beta2, float eps, float weight_decay, float grad_scale, "


@library.define(
    "scaled_adam_step(" + _LISTS + "Tensor(e!)[] copies, " + _NUMBERS + "Tensor? device_scale, "
    "int step, bool bias_correction, bool eps_inside_sqrt, Tensor(f!)? overflow=None, "
    "Tensor? noop_flag=None) -> ()"
)
def scaled_adam_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float,
    device_scale: Tensor | None,
    step: int,
    bias_correction: bool,
    eps_inside_sqrt: bool,
    overflow: Tensor | None = None,
    noop_flag: Tensor | None = None,
) -> None:
    """One Adam step over lists of tensors, in place, in Apex's first form::

        g = grads[i] / grad_scale
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        root = sqrt(v + eps) if eps_inside_sqrt else sqrt(v) + eps
        p = p - lr * sqrt(1 - beta2**step) / (1 - beta1**step) * (m / root + weight_decay * p)

    Without ``bias_correction`` the factor is ``lr``. Lists have one length; tensor ``i`` of each
    list has the same number of elements and layout. Mathematics is in float32.

    Args:
        params, grads, exp_avgs, exp_avg_sqs: each list of one dtype, float32, float16 or bfloat16;
            or all of float64. Gradients are read only.
        copies: empty, or tensors that receive the new parameters: of the same dtypes, or uint8,
            which are the upper bytes of float16 numbers.
        device_scale: float32, one element; read instead of ``grad_scale``.
        step: 1 for the first step.
        overflow: int32, one element: an element whose gradient is not finite is left as it is, and
            the number becomes 1. None: such gradients reach parameters and moments.
        noop_flag: int32, one element; where it is not 0 nothing is changed.

    Raises:
        RuntimeError: lists, dtypes, devices or layouts do not match, ``step`` is below 1, a beta is
            outside [0, 1), or ``eps`` is negative; nothing is changed then.

    Source:
        Kingma & Ba 2015, section 2; the decay is that of Loshchilov & Hutter 2019, algorithm 2,
        multiplied by the corrected learning rate.
    """


@library.define(
    "scaled_adam_undo(" + _LISTS + "Tensor flag, " + _NUMBERS + "int step, bool bias_correction, "
    "bool eps_inside_sqrt) -> ()"
)
def scaled_adam_undo(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    flag: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float,
    step: int,
    bias_correction: bool,
    eps_inside_sqrt: bool,
) -> None:
    """Take a :func:`scaled_adam_step` of the same arguments back, up to rounding.

    Elements whose gradient is not finite are left as they are: the step with ``overflow`` left
    them out.

    Args:
        flag: int32, one element; where it is 0 nothing is changed.

    Raises:
        RuntimeError: as for the step; or a beta is 0, which keeps nothing of the old moment.
    """


@library.define("cast_unless(Tensor[] inputs, Tensor(b!)[] outputs, Tensor noop_flag) -> ()")
def cast_unless(inputs: list[Tensor], outputs: list[Tensor], noop_flag: Tensor) -> None:
    """``outputs[i] = inputs[i]`` in the other's dtype.

    Args:
        inputs, outputs: each list of one dtype: float32, float16, bfloat16, or uint8, which are the
            upper bytes of float16 numbers. To them the rest is cut off, not rounded.
        noop_flag: int32, one element; where it is not 0 nothing is written.

    Raises:
        RuntimeError: lists do not match, or an output shares memory with another tensor.
    """
