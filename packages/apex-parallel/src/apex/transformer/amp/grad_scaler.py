"""A gradient scaler whose ranks skip a step together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ..._lost_ranks import explained
from .. import parallel_state
from ..placement import current_device

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for models that are divided over tensor and pipeline ranks.

    An infinite gradient on one rank makes all ranks of the model skip the step and reduce the
    scale. Before ``parallel_state`` is initialised, a rank decides alone.

    Args:
        init_scale: the first factor of losses.
        growth_factor: what the scale is multiplied by after ``growth_interval`` good steps; > 1.
        backoff_factor: what it is multiplied by after a step that was skipped; < 1.
        growth_interval: number of steps.
        enabled: if False, losses are not scaled and steps are never skipped.
        device: type of the gradients' device; by default that of the current GPU, or the CPU.

    An optimizer with an attribute ``_custom_amp_unscale_grads`` that is true, such as
    ``DistributedFusedAdam``, unscales its gradients itself: ``optimizer.unscale_grads(inv_scale,
    found_inf, allow_fp16)`` returns which devices found an inf, as a dict from device to a float32
    tensor that is 0 or 1.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        device: str | None = None,
    ) -> None:
        super().__init__(
            current_device().type if device is None else device,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
        )

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Take a step, unless a rank of the model has found an inf; see torch's."""
        if self.is_enabled() and getattr(optimizer, "_custom_amp_unscale_grads", False):
            state = self._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.READY:  # in its own step it would ask no other rank
                self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale to what the last steps found, or take a new one: a float, or a float32
        tensor of one element without gradient."""
        if isinstance(new_scale, Tensor) and new_scale.dim() and new_scale.numel() == 1:
            new_scale = new_scale.reshape(())  # torch's would not copy it
        super().update(new_scale)

    # torch's scaler calls this before every step, however the optimizer treats scales. A reduced
    # result is all that it, its step() and its update() need.
    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, *options: Any, **named: Any
    ) -> dict[torch.device, Tensor]:
        if getattr(optimizer, "_custom_amp_unscale_grads", False):
            found = optimizer.unscale_grads(inv_scale, found_inf, *options, **named)
        else:
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, *options, **named)
        # A rank without gradients takes part too.
        found = found or {found_inf.device: found_inf}
        if parallel_state.model_parallel_is_initialized():
            largest = torch.stack([tensor.to(found_inf.device) for tensor in found.values()]).amax()
            group = parallel_state.get_model_parallel_group()
            with explained("GradScaler, which asks whether a gradient is infinite,", group):
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            for tensor in found.values():
                tensor.copy_(largest)
        return found
