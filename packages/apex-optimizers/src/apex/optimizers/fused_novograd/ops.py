"""The novograd_step operator: schema, documentation and fake kernel."""

from __future__ import annotations

from torch import Tensor

from .._ops import library


@library.define(
    "novograd_step(Tensor(a!)[] params, Tensor[] grads, Tensor(c!)[] exp_avgs, Tensor(d!) norms, "
    "float lr, float beta1, float beta2, float eps, float weight_decay, int step, "
    "bool bias_correction, bool grad_averaging, bool reg_inside_moment, bool is_max_norm, "
    "bool first_run, bool maximize, Tensor? grad_norms=None, Tensor? device_lr=None, "
    "Tensor? device_step=None, Tensor? inv_scale=None, Tensor? found_inf=None) -> ()"
)
def novograd_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    bias_correction: bool,
    grad_averaging: bool,
    reg_inside_moment: bool,
    is_max_norm: bool,
    first_run: bool,
    maximize: bool,
    grad_norms: Tensor | None = None,
    device_lr: Tensor | None = None,
    device_step: Tensor | None = None,
    inv_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One NovoGrad step over lists of tensors, in place and without waiting for the device.

    Lists have one length; tensor ``i`` of each list has the same number of elements and layout.
    With ``N = norms[i]``, ``n`` the norm of ``g``, ``g = inv_scale * grads[i]``, negated to
    maximize::

        N = n if first_run
            else beta2 * N + (1 - beta2) * n if is_max_norm
            else sqrt(beta2 * N**2 + (1 - beta2) * n**2)
        D = N / sqrt(1 - beta2**step) + eps
        a = 1 - beta1 if grad_averaging else 1
        m = beta1 * m + a * (g / D + weight_decay * p)       if reg_inside_moment
            beta1 * m + a * g                                else
        u = m / (1 - beta1**step)                            if reg_inside_moment
            m / (1 - beta1**step) / D + weight_decay * p     else
        p = p - lr * u

    Args:
        params: ``p``; float64, float32, float16 or bfloat16, all of one dtype and device.
        grads: of the parameters' dtype; read only.
        exp_avgs: ``m``; float32, or of the parameters' dtype.
        norms: ``[len(params)]``, contiguous, on the parameters' device; float32 (for float64
            parameters also float64).
        step: 1 for the first step.
        bias_correction: without it both divisors with ``step`` are 1.
        is_max_norm: ``n`` is the largest absolute value, not the Euclidean norm.
        first_run: the content of ``norms`` is not used; with ``device_step`` only where that is 1.
        grad_norms: float64 [len(params)]: the norms of the whole gradients, not scaled, if
            ``grads`` are shards. None: the operator takes the norms itself.
        device_lr: float32, one element; used instead of ``lr`` and read on the device.
        device_step: int32, one element; used instead of ``step``.
        inv_scale: float32, one element: gradients are multiplied by it. None is 1.
        found_inf: float32, one element; where it is not 0 nothing is changed. None is 0.

    Raises:
        RuntimeError: lists do not match, or a number is out of range; nothing is changed then.

    Source:
        Ginsburg et al. 2019, algorithm 1, with norms instead of their squares.
    """
