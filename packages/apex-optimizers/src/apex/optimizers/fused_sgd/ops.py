"""The sgd_step operator: schema, documentation and fake kernel."""

from __future__ import annotations

from torch import Tensor

from .._ops import library


@library.define(
    "sgd_step(Tensor(a!)[] params, Tensor[] grads, Tensor(c!)[] momentum_buffers, "
    "Tensor(d!)[] copies, float lr, Tensor? device_lr, float momentum, float dampening, "
    "float weight_decay, bool nesterov, bool wd_after_momentum, bool first_run, "
    "float gradient_scale, Tensor? noop_flag, int? rounding_key=None, int rounding_step=0) -> ()"
)
def sgd_step(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    copies: list[Tensor],
    lr: float,
    device_lr: Tensor | None,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    wd_after_momentum: bool,
    first_run: bool,
    gradient_scale: float,
    noop_flag: Tensor | None,
    rounding_key: int | None = None,
    rounding_step: int = 0,
) -> None:
    """One step of stochastic gradient descent over lists of tensors, in place.

    Lists have one length; tensor ``i`` of each list has the same number of elements and layout::

        g = gradient_scale * grads[i]  (+ weight_decay * p, unless wd_after_momentum)
        b = g if first_run else momentum * b + (1 - dampening) * g
        u = g + momentum * b if nesterov else b    (+ weight_decay * p if wd_after_momentum)
        p = p - lr * u

    Args:
        params: float64, float32, float16 or bfloat16, all of one dtype and device.
        grads: of the parameters' dtype; with ``copies`` also of the copies' dtype. Read only.
        momentum_buffers: of the parameters' dtype; empty exactly if ``momentum`` is 0.
        copies: empty, or float16 or bfloat16: then ``params`` are float32, and their new values
            are also written here, rounded.
        lr: learning rate, parameter units per step.
        device_lr: float32, one element, used instead of ``lr`` and read on the device.
        first_run: the buffers' content is not used; they become the gradients.
        gradient_scale: gradients are multiplied by it; the inverse of a loss scale, negative to
            maximize.
        noop_flag: int32, one element; nothing is done where it is not 0.
        rounding_key: 64 bits; ``params``, bfloat16 without copies, are rounded up or down by chance
            then. Chances are bits of Philox4x32-10 by this key, the element's index,
            ``rounding_step``, and the tensor's number among those that have elements. None: to the
            nearest.

    Raises:
        RuntimeError: lists, dtypes, devices or layouts do not match, ``momentum`` is negative, or
            there is a ``rounding_key`` for other params; nothing is changed then.

    Source:
        Sutskever et al. 2013, section 2, in the form of :class:`torch.optim.SGD`.
    """
