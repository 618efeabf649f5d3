"""Apex's first FusedLAMB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._shared.native.writes import call_counted
from ..clip_grad.ops import clip_grad_total_norm
from .given_lists import Batches, DeprecatedOptimizer, check_grad, loss_of, match_layout
from .sharded_lamb import lamb_step

__all__ = ["FusedLAMB"]

_NAME = "apex.contrib.optimizers.FusedLAMB"
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class FusedLAMB(DeprecatedOptimizer):
    r"""LAMB in two launches per dtype; deprecated, use :class:`apex.optimizers.FusedLAMB`.

    The formula is that of :func:`apex.contrib.optimizers.sharded_lamb.lamb_step`, with
    ``use_nvlamb=False``: a group without weight decay takes plain Adam steps.

    Args:
        params: parameters, or dicts with parameter groups; float64, float32, float16 or bfloat16,
            also mixed; dense; CPU or GPU.
        lr: learning rate, parameter units per step; ``>= 0``.
        bias_correction: divide the moments by ``1 - beta**step``.
        betas: decay of the two running averages per step, each in ``[0, 1)``.
        eps: added to the root, in gradient units; ``>= 0``.
        weight_decay: per step; ``>= 0``.
        amsgrad: must be ``False``.
        adam_w_mode: decay is part of the update; ``False``: of the gradient.
        grad_averaging: weigh gradients by ``1 - beta1``; ``False``: by 1.
        set_grad_none: ``zero_grad()`` sets gradients to None; ``False``: to zero.
        max_grad_norm: clip all gradients together to this norm; 0 does not clip. A group may have
            its own.

    State, per parameter, of its shape and dtype: ``exp_avg``, ``exp_avg_sq``. A group counts its
    steps in ``step``.

    Raises:
        RuntimeError: ``amsgrad``; in :meth:`step`: a gradient is sparse or of another dtype than
            kernels know. Nothing is changed then.
        ValueError: a hyper-parameter is out of range.

    Source:
        You et al. 2020, algorithm 2.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = FusedLAMB(model.parameters(), lr=1e-2)
        >>> model(torch.randn(2, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    _name = _NAME
    _not_negative = ("lr", "eps", "weight_decay", "max_grad_norm")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
    ) -> None:
        if amsgrad:
            raise RuntimeError(f"{_NAME}: amsgrad=True is not supported.")
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_averaging=grad_averaging,
            max_grad_norm=max_grad_norm,
        )
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients: set to None if ``set_to_none``, by default the constructor's choice."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; returns what ``closure`` returned, which runs with gradients enabled.

        Gradients are left as they are. The norm stays on the device: nothing waits for it.
        """
        loss = loss_of(closure)
        batches = Batches()
        stepped = []
        for group in self.param_groups:
            rows = [(p, self._grad_of(p)) for p in group["params"] if p.grad is not None]
            if not rows:
                continue
            stepped.append(group)
            numbers = self._numbers(group)
            for param, grad in rows:
                state = self._state_of(param)
                batches.add(numbers, param, grad, state["exp_avg"], state["exp_avg_sq"])
        norms = self._norm(batches)
        for (before, after, limit), lists in batches:
            norm = norms[lists[0][0].device]
            call_counted(lamb_step, *lists, [], *before, None, *after, norm, limit, None, None)
        for group in stepped:
            group["step"] = group.get("step", 0) + 1
        return loss

    def _numbers(self, group: dict[str, Any]) -> tuple:
        """The arguments of the operator before ``device_lr``, those behind it, and the limit."""
        beta1, beta2 = group["betas"]
        step, decoupled = group.get("step", 0) + 1, self.adam_w_mode == 1
        averaging = bool(group["grad_averaging"])
        flags = (bool(group["bias_correction"]), averaging, decoupled, False)
        decay = group["weight_decay"]
        after = (beta1, beta2, group["eps"], decay, step, None, *flags)
        return (float(group["lr"]),), after, float(group["max_grad_norm"])

    def _grad_of(self, param: Tensor) -> Tensor:
        check_grad(_NAME, param, param.grad)
        if param.dtype not in _DTYPES or param.grad.dtype not in _DTYPES:
            raise RuntimeError(
                "FusedLAMB only support fp16 and fp32. (Here also bfloat16 and float64.) Got "
                f"{param.dtype} and a gradient of {param.grad.dtype}."
            )
        return match_layout(param.grad.to(param.dtype), param)

    @staticmethod
    def _norm(batches: Batches) -> dict[torch.device, Tensor]:
        """The norm of all gradients, float64 ``[1]`` on each device."""
        norms = [clip_grad_total_norm(grads, 2.0) for _, (_, grads, *_) in batches]
        if not norms:
            return {}
        total = torch.linalg.vector_norm(torch.cat([norm.to(norms[0].device) for norm in norms]))
        return {device: total.to(device).reshape(1) for device in batches.devices}
