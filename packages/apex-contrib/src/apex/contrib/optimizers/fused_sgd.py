"""Apex's first FusedSGD: a step on scaled 16-bit gradients that writes masters and model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._shared.native.writes import call_counted
from .given_lists import (
    Batches,
    DeprecatedOptimizer,
    by_group,
    checked_rows,
    fit_together,
    loss_of,
)
from .legacy_sgd import masters_sgd_step

__all__ = ["FusedSGD"]

_NAME = "apex.contrib.optimizers.FusedSGD"


class FusedSGD(DeprecatedOptimizer):
    r"""SGD on float32 masters with the model's scaled gradients; deprecated.

    Use :class:`apex.optimizers.FusedSGD`. This class is driven by
    :class:`apex.contrib.optimizers.FP16_Optimizer`, which gives :meth:`step` the gradients and the
    model's parameters.

    Args:
        params: float32 parameters, or dicts with parameter groups; dense; CPU or GPU.
        lr: learning rate, parameter units per gradient unit and step; ``>= 0``. May be left out if
            every group has its own.
        momentum: decay of the buffer per step; ``>= 0``.
        dampening: not applied in a parameter's first step.
        weight_decay: per step; ``>= 0``.
        nesterov: needs ``momentum > 0`` and ``dampening == 0``.
        wd_after_momentum: add the decay to the update and not to the gradient.
        materialize_master_grads: has no effect.

    State, per parameter, float32 of its shape: ``momentum_buffer``, if there is momentum.

    Raises:
        ValueError: a hyper-parameter is out of range, or missing.

    Source:
        Sutskever et al. 2013, section 2, in the form of :class:`torch.optim.SGD`.

    Example:
        >>> model = torch.nn.Linear(8, 4).bfloat16()
        >>> masters = [p.detach().float() for p in model.parameters()]
        >>> optimizer = FusedSGD(masters, lr=0.1, momentum=0.9)
        >>> model(torch.randn(2, 8).bfloat16()).square().mean().backward()
        >>> optimizer.step(grads=[p.grad for p in model.parameters()],
        ...                output_params=[p.data for p in model.parameters()])
    """

    _name = _NAME
    _not_negative = ("lr", "momentum", "weight_decay")

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )
        for group in self.param_groups:
            if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
                raise ValueError(
                    f"{_NAME}: nesterov=True needs momentum > 0 and dampening 0, got "
                    f"{group['momentum']} and {group['dampening']}."
                )
        self.wd_after_momentum = wd_after_momentum

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("nesterov", False)

    def get_momentums(self, params: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
        """Return the parameters' buffers, and whether one of them was made just now.

        :meth:`step` asks for one parameter at a time, so that a new one does not reset the others.
        """
        momentums, is_first_run = [], False
        for param in params:
            state = self.state[param]
            if state.get("momentum_buffer") is None:
                is_first_run = True
                state["momentum_buffer"] = torch.zeros_like(param)
            momentums.append(state["momentum_buffer"])
        return momentums, is_first_run

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Iterable[Any] | None = None,
        output_params: Iterable[Any] | None = None,
        scale: float = 1.0,
        grad_norms: Sequence[float] | None = None,
    ) -> Any:
        """Take a step.

        Args:
            closure: computes the loss again; called with gradients enabled.
            grads: gradients, float32, float16 or bfloat16: a generator or a list for the only
                group, or a list of lists, one per group. None skips a parameter.
            output_params: the model's parameters, which receive the new values, rounded; given like
                ``grads``.
            scale: what gradients were multiplied by.
            grad_norms: has no effect.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: grads or output_params are missing or do not match, or the optimizer
                belongs to :mod:`apex.amp`. Nothing is changed then.
        """
        if hasattr(self, "_amp_stash"):
            raise RuntimeError(
                f"{_NAME}.step: this class does not work with apex.amp; use "
                "apex.optimizers.FusedSGD."
            )
        loss = loss_of(closure)
        for name, given in (("grads", grads), ("output_params", output_params)):
            if given is None:
                raise RuntimeError(
                    f"{_NAME}.step: {name} must be given, as apex.contrib.optimizers."
                    "FP16_Optimizer does. Wrap this optimizer in that, or use "
                    "apex.optimizers.FusedSGD."
                )
        grads = by_group(_NAME, "grads", grads, self.param_groups)
        outputs = by_group(_NAME, "output_params", output_params, self.param_groups)
        if self._step_at_once(grads, outputs, 1.0 / scale):
            return loss
        for numbers, (params, own_grads, copies, *buffers) in self._batches(grads, outputs):
            args = (params, own_grads, buffers[0] if buffers else [], copies)
            call_counted(masters_sgd_step, *args, *numbers, 1.0 / scale)
        return loss

    def _numbers(self, group: dict[str, Any]) -> tuple[Any, ...]:
        hyper = (group["lr"], group["momentum"], group["dampening"], group["weight_decay"])
        return *map(float, hyper), bool(group["nesterov"]), bool(self.wd_after_momentum)

    def _step_at_once(self, grads: list[Any], outputs: list[Any], factor: float) -> bool:
        """Launch a group that is the only one, and whose buffers are there; False: not done."""
        if len(self.param_groups) != 1:
            return False
        (group,), (own_grads,), (copies,) = self.param_groups, grads, outputs
        params, buffers = group["params"], []
        if not fit_together(params, own_grads, copies) or any(c is None for c in copies):
            return False
        if group["momentum"]:
            states = [self.state.get(param, {}) for param in params]
            buffers = [state.get("momentum_buffer") for state in states]
            if any(buffer is None for buffer in buffers):
                return False
        lists = (params, own_grads, buffers, copies)
        try:
            call_counted(masters_sgd_step, *lists, *self._numbers(group), False, factor)
        except RuntimeError:
            rows = (params, own_grads, copies, *([buffers] if buffers else []))
            if self._batches(grads, outputs).is_only(rows):
                raise
            return False  # these lists do not fit as they are
        return True

    def _batches(self, grads: list[Any], outputs: list[Any]) -> Batches:
        """What to launch, checked as a whole before anything is changed."""
        groups = self.param_groups
        rows = []
        for group, *lists in zip(groups, grads, outputs, strict=True):
            for param, grad, output in zip(group["params"], *lists, strict=True):
                if grad is not None and (output is None or param.dtype != torch.float32):
                    raise RuntimeError(
                        f"{_NAME}.step: parameters must be float32 and have an output parameter, "
                        f"got {param.dtype} and {type(output).__name__}."
                    )
            rows += [(group, *row) for row in checked_rows(_NAME, group["params"], *lists)]
        batches = Batches()
        for group, param, grad, output in rows:
            buffers, is_first_run = [], False
            if group["momentum"]:
                buffers, is_first_run = self.get_momentums([param])
            numbers = (*self._numbers(group), is_first_run)
            batches.add(numbers, param, grad, output, *buffers)
        return batches
