"""The FusedLARS optimizer class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..stepping.buckets import Bucket
from ..stepping.momentum import MomentumOptimizer, momentum_layout
from ..stepping.optimizer import amp_c_function
from ..stepping.sharding import norms_of
from ..stepping.step import Step
from .ops import lars_step


def _launch(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    copies: list[Tensor],
    whole: Tensor | None,
    is_skipped: bool,
    *hyper: Any,
) -> None:
    """lars_step with norms; ``whole`` is a DTensor that the parameters are shards of."""
    norms = (None, None) if is_skipped else _norms(grads, params, whole)
    lars_step(params, grads, buffers, copies, *norms, *hyper)


def _norms(grads: list[Tensor], params: list[Tensor], whole: Tensor | None) -> Iterable[Tensor]:
    """Norms of both lists: in one pass where their dtype is the same."""
    if grads[0].dtype != params[0].dtype:
        return norms_of(grads, whole), norms_of(params, whole)
    return norms_of([*grads, *params], whole).chunk(2)


class FusedLARS(MomentumOptimizer):
    r"""LARS: SGD with momentum whose learning rate adapts to every parameter tensor.

    .. math::
        r = \frac{\tau \lVert p_{t-1} \rVert}
                 {\lVert g_t \rVert + \lambda \lVert p_{t-1} \rVert + \epsilon}, \qquad
        b_t = \mu b_{t-1} - \eta r (g_t + \lambda p_{t-1}), \qquad p_t = p_{t-1} + b_t

    with :math:`b_0 = 0` and Euclidean norms over the tensor; :math:`r` is 1 where a norm is 0 or
    :math:`\lVert p \rVert` is infinite. With ``nesterov`` the update is
    :math:`\mu b_t - \eta r (g_t + \lambda p_{t-1})` instead of :math:`b_t`. A group with
    ``is_skipped=True``, say of biases, has :math:`r = 1`.

    Args:
        params: parameters, or dicts with parameter groups, as for every ``torch.optim`` optimizer.
            float64, float32, float16, bfloat16, complex64 or complex128, also mixed in a group; any
            shape; dense memory in any format (contiguous, channels_last, transposed). Real and
            imaginary parts are updated as numbers of their own; norms are those of the complex
            numbers.
        lr: learning rate :math:`\eta`, dimensionless where :math:`r` applies; ``>= 0``. A number,
            or a tensor of one element; a float32 tensor on the parameters' GPU is read there. May
            be left out if every group has its own.
        momentum: :math:`\mu`, decay of the buffer per step; ``>= 0``.
        dampening: accepted, but has no effect.
        weight_decay: :math:`\lambda`, per step; ``>= 0``.
        trust_coefficient: :math:`\tau`; ``>= 0``.
        eps: :math:`\epsilon`, added to the norms, in gradient units; ``>= 0``.
        nesterov: needs ``momentum > 0`` and ``dampening == 0``.
        wd_after_momentum: accepted, but has no effect.
        materialize_master_grads: with :mod:`apex.amp` and master weights: ``True`` takes unscaled
            gradients of the masters; ``False`` the model's scaled 16-bit gradients, which are
            unscaled in the same launch.
        set_grad_none: ``zero_grad()`` sets gradients to None; ``False`` leaves that to torch, whose
            default is the same.
        maximize: maximize instead of minimizing.

    State, per parameter:
        ``momentum_buffer``: same shape and memory format as the parameter, float32, or of the
        parameter's dtype if that is float64 or complex; none if ``momentum`` is 0. It differs from
        that of :class:`torch.optim.SGD`: it includes the learning rate, and has the sign of the
        update. 4 bytes per parameter, 8 for float64.

    Raises:
        ValueError: a hyper-parameter is out of range, or missing.
        TypeError: a parameter has another dtype.
        RuntimeError: in :meth:`step`: a gradient is sparse or does not match its parameter. No
            parameter and no state is changed then.

    Note:
        Differs from Apex in that the norm is that of the unscaled gradient, a group's own ``eps``
        is used, bfloat16 and float64 are updated, and buffers of 16-bit parameters are float32.
        With master weights of :mod:`apex.amp` the same launch writes the model's 16-bit parameters.
        Norms stay on the device: a step waits for nothing. With momentum it moves 28 bytes per
        float32 parameter. A ``nan`` gradient reaches all of its tensor. An ``inf`` gradient makes
        :math:`r = 0`: its own element becomes ``nan``, the others move by momentum alone, and
        become ``nan`` in the next step. Use :mod:`apex.amp` or a ``GradScaler`` to skip such steps.

    Source:
        You, Gitman & Ginsburg, *Large Batch Training of Convolutional Networks*, 2017, algorithm 1.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> groups = [{"params": [model.weight]}, {"params": [model.bias], "is_skipped": True}]
        >>> optimizer = FusedLARS(groups, lr=1.0, momentum=0.9, weight_decay=1e-4)
        >>> model(torch.randn(2, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    layout = momentum_layout("FusedLARS")
    op = Step(
        lars_step,
        __file__,
        launch=_launch,
        before="Tensor? whole, bool is_skipped",
        without=("grad_norms", "param_norms"),
    )
    multi_tensor_lars = amp_c_function("multi_tensor_lars")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = None,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "is_skipped": False,
            "maximize": maximize,
        }
        super().__init__(
            params, defaults, wd_after_momentum, materialize_master_grads, set_grad_none
        )

    def arguments(self, bucket: Bucket) -> dict[str, Any]:
        numbers = super().arguments(bucket)
        if bucket.is_sharded:
            numbers["whole"] = bucket.params[0]
        return numbers
