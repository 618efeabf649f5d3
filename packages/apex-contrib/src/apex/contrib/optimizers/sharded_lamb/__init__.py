"""The LAMB operators: schemas, documentation and fake kernels."""

from __future__ import annotations

from torch import Tensor

from ..._ops import library

__all__ = ["lamb_apply", "lamb_step", "lamb_terms"]


@library.define(
    "lamb_step(Tensor(a!)[] params, Tensor[] grads, Tensor(c!)[] exp_avgs, "
    "Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] copies, float lr, Tensor? device_lr, float beta1, "
    "float beta2, float eps, float weight_decay, int step, Tensor? device_step, "
    "bool bias_correction, bool grad_averaging, bool decoupled, bool use_nvlamb, "
    "Tensor? global_grad_norm, float max_grad_norm, Tensor? inv_scale, Tensor? found_inf, "
    "Tensor(f!)? squares=None, int only_pass=0) -> ()"
)
def lamb_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
    lr: float,
    device_lr: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    device_step: Tensor | None,
    bias_correction: bool,
    grad_averaging: bool,
    decoupled: bool,
    use_nvlamb: bool,
    global_grad_norm: Tensor | None,
    max_grad_norm: float,
    inv_scale: Tensor | None,
    found_inf: Tensor | None,
    squares: Tensor | None = None,
    only_pass: int = 0,
) -> None:
    """One LAMB step over lists of tensors, or of parts of tensors, in place.

    Lists have one length; tensor ``i`` of each list has the same number of elements and layout::

        clip = max(1, global_grad_norm / max_grad_norm)    (nan if the norm is)
        g = inv_scale * grads[i] / clip    (+ weight_decay * p unless decoupled)
        m = beta1 * m + (1 - beta1 if grad_averaging else 1) * g
        v = beta2 * v + (1 - beta2) * g**2
        u = (m / c1) / (sqrt(v / c2) + eps)    (+ weight_decay * p if decoupled)
        p = p - lr * norm(p) / norm(u) * u

    with ``c = 1 - beta**step``, or 1 without ``bias_correction``. The ratio of norms is 1 where one
    is 0 or ``norm(p)`` infinite, and everywhere if ``weight_decay`` is 0 and not ``use_nvlamb``.

    Args:
        params, grads, exp_avgs, exp_avg_sqs: each list of one dtype, float32, float16 or bfloat16;
            or all of float64. Gradients are read only.
        copies: empty; or tensors that receive the new parameters, of the same dtypes, or uint8,
            which are the upper bytes of float16 numbers. The moments are float32 then.
        step: 1 for the first step.
        decoupled: the decay is part of the update; else it is added to the gradient.
        use_nvlamb: use the ratio of norms also without decay.
        global_grad_norm: float64, one element: the norm of the gradients of all tensors of the
            model, in the unit of ``max_grad_norm``. None: no clipping.
        max_grad_norm: what gradients are clipped to; 0 or infinity for no clipping.
        device_lr: float32, one element; read instead of ``lr``.
        device_step: int32, one element; read instead of ``step``.
        inv_scale: float32, one element: gradients are multiplied by it. None is 1.
        found_inf: float32, one element; where it is not 0 nothing is changed. None is 0.
        squares: float64 [len(params), 2], of shards: squares of norms of params and updates,
            written if ``only_pass`` is 1, read if it is 2; the caller adds up those of all shards.

    Raises:
        RuntimeError: lists do not match, or a number is out of range; nothing is changed then.

    Source:
        You et al. 2020, algorithm 2 (https://arxiv.org/abs/1904.00962).
    """


@library.define(
    "lamb_terms(Tensor[] grads, Tensor[] params, Tensor(c!)[] exp_avgs, "
    "Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] updates, Tensor numbers, Tensor gradient_factor, "
    "bool decoupled, Tensor noop_flag) -> ()"
)
def lamb_terms(
    grads: list[Tensor],
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    updates: list[Tensor],
    numbers: Tensor,
    gradient_factor: Tensor,
    decoupled: bool,
    noop_flag: Tensor,
) -> None:
    """The update ``u`` of :func:`lamb_step`, without taking it; moments are updated in place.

    Args:
        grads, params: each list of float32, float16 or bfloat16.
        exp_avgs, exp_avg_sqs, updates: float32; updates are written.
        numbers: float64 ``[len(params), 8]``, per tensor: beta1, beta2, the weights of a gradient
            and of its square, the inverses of both bias corrections, eps, weight decay.
        gradient_factor: float64, one element: gradients are multiplied by it.
        decoupled: the decay is part of the update; else it is added to the gradient.
        noop_flag: int32, one element; where it is not 0 nothing is changed.

    Raises:
        RuntimeError: lists do not match; nothing is changed then.
    """


@library.define(
    "lamb_apply(Tensor(a!)[] params, Tensor[] updates, Tensor(c!)[] copies, Tensor param_norms, "
    "Tensor update_norms, Tensor decays, Tensor lr, bool use_nvlamb, Tensor noop_flag) -> ()"
)
def lamb_apply(
    params: list[Tensor],
    updates: list[Tensor],
    copies: list[Tensor],
    param_norms: Tensor,
    update_norms: Tensor,
    decays: Tensor,
    lr: Tensor,
    use_nvlamb: bool,
    noop_flag: Tensor,
) -> None:
    """``p -= lr * param_norms[i] / update_norms[i] * u``: takes the updates of :func:`lamb_terms`.

    The ratio is 1 where a norm is 0 or that of the parameter is infinite, and for tensors whose
    decay is 0 if not ``use_nvlamb``.

    Args:
        params, updates: float32.
        copies: tensors that receive the new parameters: float32, float16 or bfloat16, or uint8,
            which are the upper bytes of float16 numbers.
        param_norms, update_norms, decays: float64 ``[len(params)]``.
        lr: float32, one element.
        noop_flag: int32, one element; where it is not 0 nothing is changed.

    Raises:
        RuntimeError: lists do not match; nothing is changed then.
    """
