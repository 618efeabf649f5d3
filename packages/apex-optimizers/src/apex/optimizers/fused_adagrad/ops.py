"""The adagrad_step operator: schema, documentation and fake kernel."""

from __future__ import annotations

from torch import Tensor

from .._ops import library


@library.define(
    "adagrad_step(Tensor(a!)[] params, Tensor[] grads, Tensor(c!)[] sums, float lr, float eps, "
    "float weight_decay, bool decoupled, bool maximize) -> ()"
)
def adagrad_step(
    params: list[Tensor],
    grads: list[Tensor],
    sums: list[Tensor],
    lr: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
) -> None:
    """One Adagrad step over lists of tensors, in place.

    Lists have one length; tensor ``i`` of each list has the same number of elements and layout::

        g = -grads[i] if maximize else grads[i]   (+ weight_decay * p, unless decoupled)
        h = h + g * g
        p = p - lr * (g / (sqrt(h) + eps)         (+ weight_decay * p, if decoupled))

    Args:
        params: ``p``; float64, float32, float16 or bfloat16, all of one dtype and device.
        grads: of the parameters' dtype; read only.
        sums: ``h``; float32, or of the parameters' dtype.
        lr: learning rate, parameter units per step.
        eps: added to the root, in gradient units.
        weight_decay: per step.
        decoupled: see above.
        maximize: maximize instead of minimizing.

    Raises:
        RuntimeError: lists, dtypes, devices or layouts do not match, or ``eps`` is negative;
            nothing is changed then.

    Source:
        Duchi, Hazan & Singer 2011, figure 1, in the form of :class:`torch.optim.Adagrad`.
    """
