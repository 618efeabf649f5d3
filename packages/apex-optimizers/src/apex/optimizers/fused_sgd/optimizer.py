"""The FusedSGD optimizer class."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..stepping.buckets import Bucket
from ..stepping.checks import SEED
from ..stepping.momentum import BUFFER, MomentumOptimizer, momentum_layout
from ..stepping.numbers import rounding_key
from ..stepping.optimizer import amp_c_function
from ..stepping.step import Step
from .ops import sgd_step

SGD = Step(sgd_step, __file__, holds=True)


class FusedSGD(MomentumOptimizer):
    r"""SGD with momentum, updating all parameters of one device and dtype in a single launch.

    .. math::
        b_t = \mu b_{t-1} + (1-d) (g_t + \lambda p_{t-1}), \qquad p_t = p_{t-1} - \eta b_t

    with :math:`b_1 = g_1 + \lambda p_0`. With ``nesterov`` the update is
    :math:`g_t + \lambda p_{t-1} + \mu b_t` instead of :math:`b_t`; with ``wd_after_momentum`` the
    decay :math:`\lambda p_{t-1}` is added to the update and not to the gradient.

    Args:
        params: parameters, or dicts with parameter groups, as for every ``torch.optim`` optimizer.
            float64, float32, float16, bfloat16, complex64 or complex128, also mixed in a group; any
            shape; dense memory in any format (contiguous, channels_last, transposed). Real and
            imaginary parts are updated as numbers of their own.
        lr: learning rate :math:`\eta`, parameter units per gradient unit and step; ``>= 0``. A
            number, or a tensor of one element; a float32 tensor on the parameters' GPU is read
            there. May be left out if every group has its own.
        momentum: :math:`\mu`, decay of the buffer per step; ``>= 0``.
        dampening: :math:`d`; not applied in a parameter's first step.
        weight_decay: :math:`\lambda`, per step; ``>= 0``.
        nesterov: needs ``momentum > 0`` and ``dampening == 0``.
        wd_after_momentum: see above.
        materialize_master_grads: with :mod:`apex.amp` and master weights: ``True`` takes unscaled
            gradients of the masters; ``False`` the model's scaled 16-bit gradients, which are
            unscaled in the same launch.
        set_grad_none: ``zero_grad()`` sets gradients to None; ``False`` leaves that to torch, whose
            default is the same.
        maximize: add the update instead of subtracting it.
        stochastic_rounding: round bfloat16 parameters up or down by chance, so that updates far
            below their precision add up in the mean, without masters; see :class:`FusedAdam`.
            Groups then count their steps, in ``group["step"]``.
        rounding_seed: in [0, 2**32); may differ between groups, whose entry it becomes.

    State, per parameter, same shape, dtype and memory format as the parameter (with master weights:
    as the float32 master):
        ``momentum_buffer``; none if ``momentum`` is 0. Names and meaning, in state and groups, are
        those of :class:`torch.optim.SGD`, so checkpoints load in both directions.

    Raises:
        ValueError: a hyper-parameter is out of range, or missing.
        TypeError: a parameter has another dtype, or is float16 with ``stochastic_rounding``.
        RuntimeError: in :meth:`step`: a gradient is sparse or does not match its parameter. No
            parameter and no state is changed then.

    Note:
        Differs from ``torch.optim.SGD`` in that 16-bit parameters are updated in float32 and
        rounded once. With master weights of :mod:`apex.amp` the same launch writes the model's
        16-bit parameters. A step with momentum moves 20 bytes per float32 parameter. ``inf`` and
        ``nan`` gradients reach the parameter; use :mod:`apex.amp` or a ``GradScaler`` to skip such
        steps.

    Source:
        Sutskever et al., *On the importance of initialization and momentum in deep learning*,
        ICML 2013, section 2, in the form of :class:`torch.optim.SGD`.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.randn(2, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    layout = momentum_layout("FusedSGD")
    kept_attributes = (*MomentumOptimizer.kept_attributes, "layout", "stochastic_rounding")
    op = SGD
    multi_tensor_sgd = amp_c_function("multi_tensor_sgd")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = None,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
        *,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            **({SEED: rounding_seed} if stochastic_rounding else {}),
            # Of no effect; in the groups of torch.optim.SGD.
            "foreach": None,
            "differentiable": False,
            "fused": None,
        }
        self.stochastic_rounding = stochastic_rounding
        if stochastic_rounding:  # random numbers depend on the step
            self.layout = dataclasses.replace(self.layout, counts_group_steps=True)
        super().__init__(
            params, defaults, wd_after_momentum, materialize_master_grads, set_grad_none
        )

    def kept_dtype(self, key: str, param: Tensor) -> torch.dtype:
        return param.dtype if key == BUFFER else super().kept_dtype(key, param)

    def arguments(self, bucket: Bucket) -> dict[str, Any]:
        numbers = super().arguments(bucket)
        numbers["wd_after_momentum"], numbers["rounding_step"] = self.wd_after_momentum, 0
        if self.stochastic_rounding:
            numbers["rounding_key"] = rounding_key(self, bucket)
            numbers["rounding_step"] = bucket.group.get("step", 0) + 1
        return numbers
