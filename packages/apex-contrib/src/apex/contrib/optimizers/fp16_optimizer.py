"""Float32 masters and a loss scale around an optimizer, in Apex's first form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._shared.native.master_owners import check_owner, claim
from .fused_adam import FusedAdam, norm_of
from .fused_sgd import FusedSGD

__all__ = ["FP16_Optimizer"]

_NAME = "apex.contrib.optimizers.FP16_Optimizer"


class FP16_Optimizer:
    """Trains a model in 16 bits with float32 masters and a loss scale; deprecated.

    Use :class:`torch.amp.GradScaler`, or :class:`apex.fp16_utils.FP16_Optimizer`. The contrib
    :class:`FusedAdam` and :class:`FusedSGD` take the scaled gradients and write the model's
    parameters in the launch of their step. Every other optimizer takes unscaled float32 gradients
    of the masters, whose new values are then copied to the model. Of two over the same parameters
    only the newer one can be used: each would overwrite the model with masters of its own.

    Args:
        init_optimizer: an optimizer over the model's parameters. Its groups hold the masters
            from now on: ``fp16_groups`` and ``fp32_groups`` are lists, one per group.
        static_loss_scale: what the loss is multiplied by.
        dynamic_loss_scale: start at 2**16 instead, halve (not below 1) where gradients overflow,
            and double after 1000 steps without.
        dynamic_loss_args: must be None.
        verbose: print a line for each overflow.

    Raises:
        ValueError: ``dynamic_loss_args`` is given, or ``static_loss_scale`` is not positive.

    Example:
        >>> model = torch.nn.Linear(8, 4).bfloat16()
        >>> optimizer = FP16_Optimizer(FusedAdam(model.parameters()), dynamic_loss_scale=True)
        >>> optimizer.zero_grad()
        >>> optimizer.backward(model(torch.randn(2, 8).bfloat16()).square().mean())
        >>> optimizer.step()
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if not hasattr(init_optimizer, "param_groups"):
            got = type(init_optimizer).__name__
            raise TypeError(f"{_NAME}: init_optimizer must be an optimizer, got {got}.")
        if dynamic_loss_args is not None:
            raise ValueError(f"{_NAME}: dynamic_loss_args must be None, got {dynamic_loss_args}.")
        if not static_loss_scale > 0:
            raise ValueError(f"{_NAME}: static_loss_scale must be > 0, got {static_loss_scale}.")
        self.optimizer, self.verbose = init_optimizer, verbose
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_groups: list[list[Tensor]] = []
        for group in init_optimizer.param_groups:
            masters = [param.detach().clone().float() for param in group["params"]]
            for master in masters:
                master.requires_grad_()
            self.fp16_groups.append(group["params"])
            self.fp32_groups.append(masters)
            group["params"] = masters
        self.dynamic_loss_scale, self.overflow = dynamic_loss_scale, False
        self.cur_iter, self.last_overflow_iter = 0, -1
        self.cur_scale = 2.0**16 if dynamic_loss_scale else static_loss_scale
        self.scale_factor, self.scale_window = 2.0, 1000
        claim(self, (param for group in self.fp16_groups for param in group))

    def zero_grad(self, set_grads_to_None: bool = True) -> None:
        """Set the model's gradients to None, or to zero."""
        for param in (param for group in self.fp16_groups for param in group):
            if set_grads_to_None:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of ``loss``, in float32 times the loss scale."""
        check_owner(self, "FP16_Optimizer.backward")
        (loss.float() * self.cur_scale).backward()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, unless a gradient is not finite; then only the loss scale changes.

        The host waits once for the norms of all groups.

        Args:
            closure: computes the gradients again, by :meth:`zero_grad` and :meth:`backward`.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a newer ``FP16_Optimizer`` was built over parameters of this one.
        """
        check_owner(self, "FP16_Optimizer.step")
        loss = closure() if closure is not None else None
        grads = [[param.grad for param in group] for group in self.fp16_groups]
        norms = self._norms(grads)
        self.overflow = not all(0 <= norm < float("inf") for norm in norms)
        if self.overflow:
            self._update_scale(True)
            return loss
        if isinstance(self.optimizer, (FusedAdam, FusedSGD)):
            self.optimizer.step(
                grads=grads,
                output_params=[[param.data for param in group] for group in self.fp16_groups],
                scale=self.cur_scale,
                grad_norms=norms,
            )
        else:
            self._step_masters(grads)
        self._update_scale(False)
        return loss

    @torch.no_grad()
    def _norms(self, grads: list[list[Tensor | None]]) -> list[float]:
        """The norm of each group's scaled gradients; one wait for all of them."""
        norms = []
        for group in grads:
            own = [grad.detach() for grad in group if grad is not None]
            norms.append(norm_of(own).reshape(1) if own else torch.zeros(1, dtype=torch.float64))
        devices = [norm.device for norm in norms if norm.device.type != "cpu"]
        device = devices[0] if devices else torch.device("cpu")
        return torch.cat([norm.to(device) for norm in norms]).tolist() if norms else []

    def _step_masters(self, grads: list[list[Tensor | None]]) -> None:
        masters = [master for group in self.fp32_groups for master in group]
        model = [param for group in self.fp16_groups for param in group]
        for master, grad in zip(masters, (g for group in grads for g in group), strict=True):
            master.grad = None if grad is None else grad.detach().float() / self.cur_scale
        self.optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, model, strict=True):
                master.grad = None
                param.copy_(master)

    def _update_scale(self, skip: bool) -> None:
        if self.dynamic_loss_scale:
            before = self.cur_scale
            if skip:
                self.cur_scale = max(before / self.scale_factor, 1)
                self.last_overflow_iter = self.cur_iter
            elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                self.cur_scale *= self.scale_factor
            if skip and self.verbose:
                print(
                    f"Gradients overflowed in iteration {self.cur_iter}: the step is skipped, and "
                    f"the loss scale goes from {before} to {self.cur_scale}."
                )
        elif skip and self.verbose:
            print(
                f"Gradients overflowed in iteration {self.cur_iter}: the step is skipped. The "
                f"static loss scale, {self.cur_scale}, may be too large."
            )
        self.cur_iter += 1

    @property
    def state(self) -> Any:
        """The optimizer's own."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own, whose parameters are the masters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    def state_dict(self) -> dict[str, Any]:
        """Scale, optimizer and masters; the model is saved by itself."""
        return {
            **{name: getattr(self, name) for name in _numbers_of(self.dynamic_loss_scale)},
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_groups": self.fp32_groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave; load the model by itself, before or after.

        Raises:
            ValueError: the masters do not match; nothing is changed then.
        """
        saved = [[master.shape for master in group] for group in state_dict["fp32_groups"]]
        own = [[master.shape for master in group] for group in self.fp32_groups]
        if saved != own:
            raise ValueError(
                f"{_NAME}.load_state_dict: fp32_groups have shapes {saved}, expected {own}."
            )
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for name in _numbers_of(state_dict["dynamic_loss_scale"]):
            setattr(self, name, state_dict[name])
        with torch.no_grad():
            for group, saved_group in zip(self.fp32_groups, state_dict["fp32_groups"], strict=True):
                for master, value in zip(group, saved_group, strict=True):
                    master.copy_(value)


def _numbers_of(is_dynamic: bool) -> tuple[str, ...]:
    """The attributes that a state holds."""
    scale = ("dynamic_loss_scale", "cur_scale", "cur_iter")
    return (*scale, "last_overflow_iter", "scale_factor", "scale_window") if is_dynamic else scale
