"""The LAMB operators: schemas, documentation and fake kernels."""

from __future__ import annotations

from torch import Tensor

from .._ops import library

_LAMB_STEP = (
    "lamb_step(Tensor(a!)[] params, Tensor[] grads, Tensor(c!)[] exp_avgs, "
    "Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] copies, float lr, Tensor? device_lr, float beta1, "
    "float beta2, float eps, float weight_decay, int step, Tensor? device_step, "
    "bool bias_correction, bool grad_averaging, bool decoupled, bool use_nvlamb, bool maximize, "
    "Tensor? global_grad_norm, float max_grad_norm, Tensor? device_max_grad_norm, "
    "Tensor? inv_scale, Tensor? found_inf, int? rounding_key=None, Tensor(f!)? squares=None, "
    "int only_pass=0) -> ()"
)


@library.define(_LAMB_STEP)
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
    maximize: bool,
    global_grad_norm: Tensor | None,
    max_grad_norm: float,
    device_max_grad_norm: Tensor | None,
    inv_scale: Tensor | None,
    found_inf: Tensor | None,
    rounding_key: int | None = None,
    squares: Tensor | None = None,
    only_pass: int = 0,
) -> None:
    """One LAMB step over lists of tensors, in place.

    Lists have one length; tensor ``i`` of each list has the same number of elements and layout::

        clip = max(1, global_grad_norm / max_grad_norm)    (nan if the norm is)
        g = inv_scale * grads[i] / clip    (-g to maximize; + weight_decay * p unless decoupled)
        m = beta1 * m + (1 - beta1 if grad_averaging else 1) * g
        v = beta2 * v + (1 - beta2) * g**2
        u = (m / c1) / (sqrt(v / c2) + eps)    (+ weight_decay * p if decoupled)
        p = p - lr * norm(p) / norm(u) * u

    with ``c = 1 - beta**step``, or 1 without ``bias_correction``. The ratio of norms is 1 where one
    is 0 or ``norm(p)`` infinite, and everywhere if ``weight_decay`` is 0 and not ``use_nvlamb``.

    Args:
        params: float64, float32, float16 or bfloat16, all of one dtype and device.
        grads: of the parameters' dtype; with ``copies`` also of the copies' dtype. Read only.
        exp_avgs, exp_avg_sqs: float32, or of the parameters' dtype.
        copies: empty, or 16-bit: they receive the new float32 ``params``, rounded.
        step: 1 for the first step.
        decoupled: decay the update; else the gradient.
        use_nvlamb: use the ratio of norms also without decay.
        global_grad_norm: float32 or float64, one element: the norm of the gradients of all tensors
            of the model, in the unit of ``max_grad_norm``. None: no clipping.
        max_grad_norm: what gradients are clipped to; 0 or infinity for no clipping.
        device_lr, device_max_grad_norm: float32, one element; used instead of ``lr`` and
            ``max_grad_norm`` and read on the device.
        device_step: int32, one element; used instead of ``step``.
        inv_scale: float32, one element: gradients are multiplied by it. None is 1.
        found_inf: float32, one element; where it is not 0 nothing is changed. None is 0.
        rounding_key: as in ``adam_step``, for bfloat16 ``params`` without copies.
        squares: float64 [len(params), 2], of shards: squares of norms of params and updates,
            written if ``only_pass`` is 1, read if it is 2; the caller adds up those of all shards.

    Raises:
        RuntimeError: lists do not match, or a number is out of range; nothing is changed then.

    Source:
        You et al. 2020, algorithm 2 (https://arxiv.org/abs/1904.00962).
    """


@library.define(
    "lamb_stage1(Tensor[] grads, Tensor[] params, Tensor(c!)[] exp_avgs, "
    "Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] updates, Tensor per_tensor_decay, float beta1, "
    "float beta2, float eps, int step, Tensor global_grad_norm, float max_grad_norm) -> ()"
)
def lamb_stage1(
    grads: list[Tensor],
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    updates: list[Tensor],
    per_tensor_decay: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
) -> None:
    """The update ``u`` of :func:`lamb_step`, without taking it; moments are updated in place.

    Decay is decoupled, gradients are averaged and biases corrected.

    Args:
        grads, params: of one dtype: float64, float32, float16 or bfloat16. Read only.
        exp_avgs, exp_avg_sqs: float32, or of the parameters' dtype.
        updates: float32, or of the parameters' dtype; written.
        per_tensor_decay: float32 ``[len(params)]``: the weight decay of each tensor.
        step: 1 for the first step.
        global_grad_norm: float32 or float64, one element.
        max_grad_norm: what gradients are clipped to; 0 or infinity for no clipping.

    Raises:
        RuntimeError: lists do not match, or a number is out of range; nothing is changed then.
    """


@library.define(
    "lamb_stage2(Tensor(a!)[] params, Tensor[] updates, Tensor param_norms, Tensor update_norms, "
    "float lr, float weight_decay, bool use_nvlamb) -> ()"
)
def lamb_stage2(
    params: list[Tensor],
    updates: list[Tensor],
    param_norms: Tensor,
    update_norms: Tensor,
    lr: float,
    weight_decay: float,
    use_nvlamb: bool,
) -> None:
    """``p -= lr * param_norms[i] / update_norms[i] * u``: takes the updates of :func:`lamb_stage1`.

    The ratio is 1 where a norm is 0 or that of the parameter is infinite, and for all tensors if
    ``weight_decay`` is 0 and not ``use_nvlamb``.

    Args:
        params: float64, float32, float16 or bfloat16, all of one dtype.
        updates: float32, or of the parameters' dtype. Read only.
        param_norms, update_norms: float64 ``[len(params)]``.

    Raises:
        RuntimeError: lists, dtypes, devices or layouts do not match; nothing is changed then.
    """
