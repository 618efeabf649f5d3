"""The operator of the deprecated FusedSGD: schema, documentation and fake kernel."""

from __future__ import annotations

from torch import Tensor

from ..._ops import library

__all__ = ["masters_sgd_step"]


@library.define(
    "masters_sgd_step(Tensor(a!)[] params, Tensor[] grads, Tensor(c!)[] momentum_buffers, "
    "Tensor(d!)[] copies, float lr, float momentum, float dampening, float weight_decay, "
    "bool nesterov, bool wd_after_momentum, bool first_run, float gradient_scale) -> ()"
)
def masters_sgd_step(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    copies: list[Tensor],
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    wd_after_momentum: bool,
    first_run: bool,
    gradient_scale: float,
) -> None:
    """One step of stochastic gradient descent over float32 masters and the model's copies of them.

    Lists have one length; tensor ``i`` of each list has the same number of elements and layout::

        g = gradient_scale * grads[i]  (+ weight_decay * p, unless wd_after_momentum)
        b = g if first_run else momentum * b + (1 - dampening) * g
        u = g + momentum * b if nesterov else b    (+ weight_decay * p if wd_after_momentum)
        p = p - lr * u

    Args:
        params: float32.
        grads: float32, float16 or bfloat16, one dtype; read only.
        momentum_buffers: float32; empty exactly if ``momentum`` is 0.
        copies: float32, float16 or bfloat16, one dtype; they receive the new ``params``, rounded.
        first_run: the buffers' content is not used; they become the gradients.
        gradient_scale: gradients are multiplied by it; the inverse of a loss scale.

    Raises:
        RuntimeError: lists, dtypes, devices or layouts do not match, or ``momentum`` is negative;
            nothing is changed then.

    Source:
        Sutskever et al. 2013, section 2, in the form of :class:`torch.optim.SGD`.
    """
