"""The record that amp keeps with an optimizer: parameters by kind, masters, stashed gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ..casting.casts import HALVES
from .amp_c import AmpCAttributes

__all__ = ["AmpOptimizerState"]


def overflow_notice(loss_id: int, new_scale: float, old_scale: float | None = None) -> str:
    """The message about a skipped step, in Apex's words, because people search logs for them."""
    change = "keeping its loss scale of" if new_scale == old_scale else "reducing loss scale to"
    return f"Gradient overflow.  Skipping step, loss scaler {loss_id} {change} {new_scale}"


class AmpOptimizerState(AmpCAttributes):
    """The record that amp keeps with an optimizer, in its attribute ``_amp_stash``.

    Attributes:
        lazy_init_called: parameters have been sorted into the lists below.
        already_patched: the next step is going to be skipped.
        params_have_scaled_gradients: the last backward pass delayed its unscaling.
        is_in_block: a ``scale_loss`` block is open.
        is_prepared: gradients have been put aside, and are to be put back or added.
        check_is_delayed: a later block looks for overflows in the present gradients.
        fp16_groups, fp32_from_fp16_groups, fp32_from_fp32_groups: with master weights, per
            parameter group: the model's 16-bit parameters, their masters, the float32 ones.
        all_fp16_params, all_fp32_from_fp16_params, all_fp32_from_fp32_params: the same, flat.
        all_fp32_params: float32 parameters, without master weights.
        all_fp16_grad_stash, all_fp32_grad_stash, all_fp32_from_fp32_grad_stash: gradients of
            earlier backward passes, during a backward pass and until it is unscaled; else None.

    If a group has a parameter twice, the lists of groups have it twice, and the flat ones once.
    """

    hooks: tuple[Callable, ...] = ()  # before and after the present backward pass

    def __init__(self) -> None:
        self.lazy_init_called = False
        self.already_patched = False
        self.params_have_scaled_gradients = False
        self.has_masters = False
        self.is_in_block = False
        self.is_prepared = False
        self.check_is_delayed = False
        self.writes_model_params = False  # the optimizer rounds masters into the model itself
        self.skip_notice = ""
        self.originals: dict[str, Callable] = {}
        self.frozen: list[tuple[int, torch.Tensor]] = []  # (group, parameter without requires_grad)
        for name in (
            *("fp16_groups", "fp32_from_fp16_groups", "fp32_from_fp32_groups"),
            *("all_fp16_params", "all_fp32_from_fp16_params", "all_fp32_from_fp32_params"),
            *("all_fp32_params", "all_fp16_grad_stash", "all_fp32_grad_stash"),
            "all_fp32_from_fp32_grad_stash",
        ):
            setattr(self, name, [])

    def enlist(self, params: Iterable[torch.Tensor]) -> None:
        """Put parameters into the lists, without masters."""
        known = {id(param) for param in (*self.all_fp16_params, *self.all_fp32_params)}
        for param in params:
            if id(param) not in known:
                known.add(id(param))
                self._append("fp16" if param.dtype in HALVES else "fp32", param)

    def enlist_with_master(
        self, group: int, param: torch.Tensor, master: torch.Tensor, is_new: bool
    ) -> None:
        """Put a parameter and its master into the lists; one that needs none is its own."""
        if master is param:
            self.fp32_from_fp32_groups[group].append(param)
            if is_new:
                self._append("fp32_from_fp32", param)
            return
        self.fp16_groups[group].append(param)
        self.fp32_from_fp16_groups[group].append(master)
        if is_new:
            self._append("fp16", param)
            self.all_fp32_from_fp16_params.append(master)

    def _append(self, kind: str, param: torch.Tensor) -> None:
        getattr(self, f"all_{kind}_params").append(param)
        getattr(self, f"all_{kind}_grad_stash").append(None)

    def masters(self) -> dict[int, torch.Tensor]:
        """The ``id`` of each parameter -> the tensor on which the optimizer steps instead."""
        pairs = zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True)
        return {id(param): master for param, master in pairs} | {
            id(param): param for param in self.all_fp32_from_fp32_params
        }

    def unscaled_in_place(self) -> list[torch.Tensor]:
        """The parameters whose gradients are unscaled in place, not into a master's."""
        halves = [] if self.has_masters else self.all_fp16_params
        return [*halves, *self.all_fp32_params, *self.all_fp32_from_fp32_params]

    def has_grads(self) -> bool:
        """Whether a parameter of the model has a gradient."""
        for params in (self.all_fp16_params, self.all_fp32_params, self.all_fp32_from_fp32_params):
            for param in params:
                if param.grad is not None:
                    return True
        return False

    def drop_scaled_grads(self) -> None:
        """Drop gradients of passes with a delayed unscaling, and the gradients from before them."""
        self.params_have_scaled_gradients = self.is_prepared = False
        for name in ("all_fp16", "all_fp32", "all_fp32_from_fp32"):
            grads = getattr(self, f"{name}_grad_stash")
            grads[:] = [None] * len(grads)

    def skip_next_step(
        self, loss_id: int, new_scale: float, old_scale: float | None = None
    ) -> None:
        """Let the next step do nothing; several backward passes may ask for that."""
        if not self.already_patched:
            self.already_patched = True
            self.skip_notice = overflow_notice(loss_id, new_scale, old_scale)
