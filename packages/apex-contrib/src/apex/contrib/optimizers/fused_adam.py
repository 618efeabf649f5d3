"""Apex's first FusedAdam, which takes scaled gradients and writes 16-bit parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._shared.native.writes import call_counted
from ..clip_grad.ops import clip_grad_total_norm
from .given_lists import (
    Batches,
    DeprecatedOptimizer,
    by_group,
    checked_rows,
    fit_together,
    loss_of,
)
from .legacy_adam import scaled_adam_step

__all__ = ["FusedAdam"]

_NAME = "apex.contrib.optimizers.FusedAdam"


class FusedAdam(DeprecatedOptimizer):
    r"""Adam with decoupled decay on scaled gradients; deprecated.

    Use :class:`apex.optimizers.FusedAdam`.

    .. math::
        g = \frac{\mathrm{grad}}{s}, \qquad
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g, \qquad v_t = \beta_2 v_{t-1} + (1-\beta_2) g^2

        p_t = p_{t-1} - \eta \frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t}
              \left( \frac{m_t}{\sqrt{v_t} + \epsilon} + \lambda p_{t-1} \right)

    Differs from AdamW: :math:`\epsilon` is added to the root before the bias correction, and the
    decay is multiplied by the corrected learning rate.

    Args:
        params: parameters, or dicts with parameter groups; float32, float16 or bfloat16, or
            float64; dense; CPU or GPU.
        lr: learning rate :math:`\eta`, parameter units per step; ``>= 0``.
        bias_correction: without it the fraction before the parentheses is 1.
        betas: decay of the two running averages per step, each in ``[0, 1)``.
        eps: :math:`\epsilon`, in gradient units; ``>= 0``.
        eps_inside_sqrt: divide by :math:`\sqrt{v_t + \epsilon}` instead.
        weight_decay: :math:`\lambda`, per step; ``>= 0``.
        max_grad_norm: clip the gradients of each group to this norm; 0 does not clip.
        amsgrad: must be ``False``.
        use_mt: all parameters must be on one device; of no other effect, because every step takes
            lists.
        amp_scale_adjustment: multiplies a loss scale that amp hands over.

    State, per parameter, of its shape and dtype: ``exp_avg``, ``exp_avg_sq``; and ``step``.

    Raises:
        RuntimeError: ``amsgrad``, or ``use_mt`` with parameters on several devices.
        ValueError: a hyper-parameter is out of range.

    Source:
        Kingma & Ba 2015, section 2.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = FusedAdam(model.parameters(), lr=1e-3)
        >>> (model(torch.randn(2, 8)).square().mean() * 128).backward()
        >>> optimizer.step(scale=128)
    """

    _name = _NAME
    _not_negative = ("lr", "eps", "weight_decay", "max_grad_norm")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        if amsgrad:
            raise RuntimeError(f"{_NAME}: amsgrad=True is not supported; use torch.optim.AdamW.")
        self.eps_mode = 0 if eps_inside_sqrt else 1
        self._use_multi_tensor = use_mt
        self._amp_scale_adjustment = amp_scale_adjustment
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
        )
        if use_mt:
            self._check_one_device()

    def _check_one_device(self) -> None:
        devices = {p.device for group in self.param_groups for p in group["params"]}
        if len(devices) > 1:
            raise RuntimeError(
                f"{_NAME}: use_mt=True needs all parameters on one device, got "
                f"{sorted(map(str, devices))}."
            )

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Iterable[Any] | None = None,
        output_params: Iterable[Any] | None = None,
        scale: float | Tensor = 1.0,
        grad_norms: Sequence[float | Tensor] | None = None,
    ) -> Any:
        """Take a step.

        Args:
            closure: computes the loss again; called with gradients enabled.
            grads: gradients instead of the parameters' ``.grad``: a generator or a list for the
                only group, or a list of lists, one per group. None skips a parameter.
            output_params: tensors that receive the new parameters, rounded; given like ``grads``.
                float32, float16 or bfloat16, or uint8: upper bytes of float16 numbers.
            scale: what gradients were multiplied by.
            grad_norms: the norm of each group's (scaled) gradients, for ``max_grad_norm``. Without
                it a pass over the gradients computes it.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a gradient is sparse, or tensors do not match. No parameter and no state
                is changed then.
        """
        loss = loss_of(closure)
        stash = getattr(self, "_amp_stash", None)
        if hasattr(stash, "grads"):  # of an amp that leaves the unscaling to this optimizer
            grads, output_params = stash.grads, stash.output_params
            scale, grad_norms = stash.scale * self._amp_scale_adjustment, stash.grad_norms
        if self._use_multi_tensor:
            self._check_one_device()
        groups = self.param_groups
        grads = [
            [p.grad if g is None else g for p, g in zip(group["params"], own, strict=True)]
            for group, own in zip(groups, by_group(_NAME, "grads", grads, groups), strict=True)
        ]
        outputs = by_group(_NAME, "output_params", output_params, groups)
        norms = [None] * len(groups) if grad_norms is None else list(grad_norms)
        if len(norms) != len(groups):
            raise RuntimeError(
                f"{_NAME}.step: grad_norms must have one number per group, {len(groups)}, got "
                f"{len(norms)}."
            )
        if self._step_at_once(grads, outputs, scale, norms):
            return loss
        batches, stepped = self._batches(grads, outputs, scale, norms)
        for numbers, lists in batches:
            self._launch(numbers, *lists)
        for param in stepped:
            self.state[param]["step"] += 1
        return loss

    def _launch(self, numbers: tuple[Any, ...], *lists: Any) -> None:
        """Step parameters with gradients and moments; the last list, if there, are the copies."""
        (*hyper, factor, step, corrects) = numbers
        device_scale = factor if isinstance(factor, Tensor) else None
        host_scale = 1.0 if device_scale is not None else factor
        copies = lists[4] if len(lists) > 4 else []
        scales = (host_scale, device_scale)
        options = (corrects, self.eps_mode == 0)
        call_counted(scaled_adam_step, *lists[:4], copies, *hyper, *scales, step, *options)

    def _step_at_once(
        self, grads: list[Any], outputs: list[Any], scale: Any, norms: list[Any]
    ) -> bool:
        """Launch a group that is the only one, and has made steps together; False: not done."""
        if len(self.param_groups) != 1:
            return False
        (group,), (own,), (copies,) = self.param_groups, grads, outputs
        params = group["params"]
        states = [self.state.get(param) for param in params]
        if not all(states) or not fit_together(params, own, copies):
            return False
        steps = {state["step"] for state in states}
        if len(steps) != 1 or len({copy is None for copy in copies}) != 1:
            return False
        moments = [[state[key] for state in states] for key in ("exp_avg", "exp_avg_sq")]
        numbers = (*_hyper(group), _combined_scale(group, own, scale, norms[0]), steps.pop() + 1)
        lists = [params, own, *moments, *([] if copies[0] is None else [copies])]
        try:
            self._launch((*numbers, bool(group["bias_correction"])), *lists)
        except RuntimeError:
            if self._batches([own], [copies], scale, norms)[0].is_only(lists):
                raise
            return False  # these lists do not fit as they are
        for state in states:
            state["step"] += 1
        return True

    def _batches(
        self, grads: list[Any], outputs: list[Any], scale: Any, norms: list[Any]
    ) -> tuple[Batches, list[Tensor]]:
        """What to launch, checked as a whole before anything is changed; and what it steps."""
        groups = self.param_groups
        batches, stepped = Batches(), []
        for group, own_grads, own_outputs, norm in zip(groups, grads, outputs, norms, strict=True):
            rows = checked_rows(_NAME, group["params"], own_grads, own_outputs)
            factor = _combined_scale(group, [grad for _, grad, *_ in rows], scale, norm)
            for param, grad, *output in rows:
                state = self._state_of(param, step=0)
                corrects = bool(group["bias_correction"])
                numbers = (*_hyper(group), factor, state["step"] + 1, corrects)
                batches.add(numbers, param, grad, state["exp_avg"], state["exp_avg_sq"], *output)
                stepped.append(param)
        return batches, stepped


def _hyper(group: dict[str, Any]) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    return float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"]


def _combined_scale(
    group: dict[str, Any], grads: list[Tensor], scale: float | Tensor, norm: float | Tensor | None
) -> float | Tensor:
    """What gradients are divided by: the loss scale, and what clips their norm.

    A number if all is known on the host; else float32 ``[1]`` on the device, which nothing waits
    for.
    """
    limit = group["max_grad_norm"]
    if not grads:
        return 1.0
    device = grads[0].device
    if limit > 0 and norm is None:
        norm = norm_of(grads)
    if isinstance(norm, Tensor) or isinstance(scale, Tensor):
        whole = torch.as_tensor(scale, dtype=torch.float64).to(device).reshape(1)
        if limit > 0:
            norm = torch.as_tensor(norm, dtype=torch.float64).to(device)
            whole = whole * ((norm / whole + 1e-6) / limit).clamp(min=1)
        return whole.float()
    clip = (norm / scale + 1e-6) / limit if limit > 0 else 1
    return float(scale * clip) if clip > 1 else float(scale)


def norm_of(grads: list[Tensor]) -> Tensor:
    """The norm of gradients of any dtypes and devices, as one vector; float64, without waiting."""
    lists = Batches()
    for grad in grads:
        lists.add((), grad)
    norms = [clip_grad_total_norm(own, 2.0) for _, (own,) in lists]
    return torch.linalg.vector_norm(torch.cat([norm.to(grads[0].device) for norm in norms]))
