"""The lars_step operator: schema, documentation and fake kernel."""

from __future__ import annotations

from torch import Tensor

from .._ops import library


@library.define(
    "lars_step(Tensor(a!)[] params, Tensor[] grads, Tensor(c!)[] momentum_buffers, "
    "Tensor(d!)[] copies, Tensor? grad_norms, Tensor? param_norms, float lr, Tensor? device_lr, "
    "float trust_coefficient, float eps, float momentum, float weight_decay, bool nesterov, "
    "bool first_run, float gradient_scale, Tensor? noop_flag) -> ()"
)
def lars_step(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    copies: list[Tensor],
    grad_norms: Tensor | None,
    param_norms: Tensor | None,
    lr: float,
    device_lr: Tensor | None,
    trust_coefficient: float,
    eps: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    first_run: bool,
    gradient_scale: float,
    noop_flag: Tensor | None,
) -> None:
    """One LARS step over lists of tensors, in place.

    Lists have one length; tensor ``i`` of each list has the same number of elements and layout.
    With ``n = abs(gradient_scale) * grad_norms[i]`` and ``w = param_norms[i]``::

        r = 1 if n == 0 or w == 0 or w == inf or there are no norms
            else trust_coefficient * w / (n + weight_decay * w + eps)
        u = lr * r * (gradient_scale * grads[i] + weight_decay * p)
        b = momentum * b - u        (b = -u if first_run)
        p = p + (momentum * b - u if nesterov else b)

    Args:
        params: ``p``; float64, float32, float16 or bfloat16, all of one dtype and device.
        grads: of the parameters' dtype; with ``copies`` also of the copies' dtype. Read only.
        momentum_buffers: ``b``; float32, or of the parameters' dtype; empty exactly if ``momentum``
            is 0.
        copies: empty, or float16 or bfloat16: then ``params`` are float32, and their new values
            are also written here, rounded.
        grad_norms, param_norms: Euclidean norms of ``grads`` and ``params``, ``[len(params)]``,
            contiguous, float32, or float64 for float64 parameters. Both None: ``r`` is 1.
        lr: learning rate, parameter units per step where ``r`` is 1.
        device_lr: float32, one element, used instead of ``lr`` and read on the device.
        first_run: the buffers' content is not used.
        gradient_scale: gradients are multiplied by it; the inverse of a loss scale, negative to
            maximize.
        noop_flag: int32, one element; nothing is done where it is not 0.

    Raises:
        RuntimeError: lists, dtypes, devices or layouts do not match, or ``eps`` or ``momentum`` is
            negative; nothing is changed then.

    Source:
        You, Gitman & Ginsburg 2017, algorithm 1.
    """
