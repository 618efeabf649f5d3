"""The FusedAdagrad optimizer class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..stepping.buckets import Bucket, StateLayout
from ..stepping.optimizer import FusedOptimizer, amp_c_function
from ..stepping.step import Step
from .ops import adagrad_step

ADAGRAD = Step(adagrad_step, __file__, holds=True)


class FusedAdagrad(FusedOptimizer):
    r"""Adagrad, updating all parameters of one device and dtype in a single launch.

    .. math::
        g_t \leftarrow g_t + \lambda p_{t-1}, \qquad h_t = h_{t-1} + g_t^2, \qquad
        p_t = p_{t-1} - \eta \frac{g_t}{\sqrt{h_t} + \epsilon}

    With ``adagrad_w_mode=True`` the decay does not go into the gradient, but into the update:
    :math:`p_t = p_{t-1} - \eta (g_t / (\sqrt{h_t} + \epsilon) + \lambda p_{t-1})`.

    Args:
        params: parameters, or dicts with parameter groups, as for every ``torch.optim`` optimizer.
            float64, float32, float16, bfloat16, complex64 or complex128, also mixed in a group; any
            shape; dense memory in any format (contiguous, channels_last, transposed). Real and
            imaginary parts are updated as numbers of their own.
        lr: learning rate :math:`\eta`, parameter units per step; ``>= 0``. A number, or a tensor of
            one element.
        eps: added to the root, in gradient units; ``>= 0``.
        weight_decay: :math:`\lambda`, per step; ``>= 0``.
        set_grad_none: ``zero_grad()`` sets gradients to None by default.
        adagrad_w_mode: decoupled decay, see above.
        maximize: maximize instead of minimizing.

    State, per parameter, made at its first gradient:
        ``sum``: :math:`h_t`, same shape and memory format as the parameter, float32, or of the
        parameter's dtype if that is float64 or complex; starts at 0. ``step``: the count of steps
        that the parameter took. Names and meaning, in state and groups, are those of
        :class:`torch.optim.Adagrad`, so checkpoints load in both directions. 4 bytes per parameter,
        8 for float64.

    Raises:
        ValueError: a hyper-parameter is out of range; in :meth:`load_state_dict` also: the state
            comes from a ``torch.optim.Adagrad`` with ``lr_decay`` or ``differentiable``.
        TypeError: a parameter has another dtype.
        RuntimeError: in :meth:`step`: a gradient is sparse or does not match its parameter. No
            parameter and no state is changed then.

    Note:
        Differs from ``torch.optim.Adagrad`` in that 16-bit parameters have a float32 ``sum``, are
        updated in float32 and rounded once, and in that there is no ``lr_decay``: use
        :mod:`torch.optim.lr_scheduler`. A step moves 20 bytes per float32 parameter. ``inf`` and
        ``nan`` gradients reach the parameter; use :mod:`apex.amp` or a ``GradScaler`` to skip such
        steps.

    Source:
        Duchi, Hazan & Singer, *Adaptive Subgradient Methods for Online Learning and Stochastic
        Optimization*, JMLR 12, 2011, figure 1, in the form of :class:`torch.optim.Adagrad`.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = FusedAdagrad(model.parameters(), lr=0.01)
        >>> model(torch.randn(2, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    layout = StateLayout("FusedAdagrad", ("sum",), counts_group_steps=False)
    kept_attributes = ("adagrad_w_mode",)
    op = ADAGRAD
    replayable = True
    multi_tensor_adagrad = amp_c_function("multi_tensor_adagrad")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0
        self.set_grad_none = set_grad_none
        defaults = {
            "lr": lr,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            # Of torch.optim.Adagrad, which needs them in the groups of a state that it loads.
            "lr_decay": 0,
            "initial_accumulator_value": 0,
            "foreach": None,
            "differentiable": False,
            "fused": None,
        }
        super().__init__(params, defaults)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        _check_supported("FusedAdagrad", group)

    def init_state(self, group: dict[str, Any], param: Tensor) -> int:
        is_new = "sum" not in self.state[param]
        steps = super().init_state(group, param)
        if is_new and group["initial_accumulator_value"] != 0:  # a group of torch.optim.Adagrad
            self.state[param]["sum"].fill_(_first_value(group, param))
        return steps

    def state_dict(self) -> dict[str, Any]:
        """The state, with one for every parameter: torch.optim.Adagrad cannot make it later."""
        saved = super().state_dict()
        for group, packed in zip(self.param_groups, saved["param_groups"], strict=True):
            for param, index in zip(group["params"], packed["params"], strict=True):
                if "sum" not in saved["state"].get(index, {}):
                    saved["state"][index] = self._first_state(group, param)
        return saved

    def _first_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Tensor]:
        value, dtype = _first_value(group, param), self.kept_dtype("sum", param)
        total = torch.full_like(param, value, dtype=dtype, requires_grad=False)
        return {"step": torch.tensor(0.0, dtype=torch.float32, device="cpu"), "sum": total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, of ``torch.optim.Adagrad``, or of Apex's.

        Sums keep their precision: they are not cast to the dtype of 16-bit parameters.

        Raises:
            ValueError: groups, or shapes of the state, do not fit; or a group has ``lr_decay`` or
                ``differentiable``. Nothing is changed then.
        """
        for group in state_dict["param_groups"]:
            _check_supported("FusedAdagrad.load_state_dict", group)
        super().load_state_dict(state_dict)

    def arguments(self, bucket: Bucket) -> dict[str, Any]:
        return {**super().arguments(bucket), "decoupled": self.adagrad_w_mode}


def _first_value(group: dict[str, Any], param: Tensor) -> complex | float:
    value = group["initial_accumulator_value"]
    return complex(value, value) if param.is_complex() else value


def _check_supported(where: str, group: dict[str, Any]) -> None:
    """Raise ValueError for options of torch.optim.Adagrad that FusedAdagrad does not have."""
    if group.get("lr_decay", 0) != 0:
        raise ValueError(
            f"{where}: lr_decay must be 0, got {group['lr_decay']}. Use "
            "torch.optim.lr_scheduler.LambdaLR with lambda t: 1 / (1 + lr_decay * t), or "
            "torch.optim.Adagrad."
        )
    if group.get("differentiable"):
        raise ValueError(
            f"{where}: differentiable=True is not supported, FusedAdagrad's step is not "
            "differentiable. Use torch.optim.Adagrad."
        )
