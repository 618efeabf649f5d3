"""What ``FP16_Optimizer`` does to parameters and gradients."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..amp._shared.native.master_owners import claim
from ..amp.casting.casts import HALVES


def add_masters(self: Any) -> None:
    """Replace 16-bit parameters in the groups by float32 masters; state moves to the masters.

    Parameters that need no gradients are left out. A later call adds those that need gradients by
    then, at their place among the others, because checkpoints follow the groups' order.

    Raises:
        TypeError: a parameter that needs gradients is of another dtype; nothing is changed then.
    """
    _check_dtypes(self)
    model_params = dict(zip(self.all_fp32_from_fp16_params, self.all_fp16_params, strict=True))
    known_fp32 = set(self.all_fp32_from_fp32_params)
    self.fp16_groups, self.fp32_from_fp16_groups, self.fp32_from_fp32_groups = [], [], []
    without_masters = []
    for group in self.optimizer.param_groups:
        fp16, from_fp16, from_fp32 = [], [], []
        for i, param in enumerate(group["params"]):
            if param in model_params:
                fp16.append(model_params[param])
                from_fp16.append(param)
            elif param in known_fp32:
                from_fp32.append(param)
            elif param.requires_grad:
                param.grad = None
                if param.dtype in HALVES:
                    without_masters.append(param)
                    fp16.append(param)
                    from_fp16.append(_put_master(self, group["params"], i))
                else:
                    from_fp32.append(param)
        self.fp16_groups.append(fp16)
        self.fp32_from_fp16_groups.append(from_fp16)
        self.fp32_from_fp32_groups.append(from_fp32)
    self.all_fp16_params = list(chain(*self.fp16_groups))
    self.all_fp32_from_fp16_params = list(chain(*self.fp32_from_fp16_groups))
    self.all_fp32_from_fp32_params = list(chain(*self.fp32_from_fp32_groups))
    claim(self, without_masters)
    if self.optimizer.state:  # in the dtype of the parameters, which has changed
        self.optimizer.load_state_dict(self.optimizer.state_dict())


def _put_master(self: Any, params: list[Tensor], i: int) -> Tensor:
    """Let the optimizer step on a master instead of ``params[i]``; returns it."""
    param = params[i]
    params[i] = master = param.detach().float().requires_grad_()
    if param in self.optimizer.state:
        self.optimizer.state[master] = self.optimizer.state.pop(param)
    return master


def adopt_unfrozen(self: Any) -> None:
    """Add parameters that needed no gradients so far, but need them now.

    Otherwise the optimizer would step on their scaled gradients, in 16 bits.
    """
    listed = (*self.all_fp32_from_fp16_params, *self.all_fp32_from_fp32_params)
    needed = [p for g in self.optimizer.param_groups for p in g["params"] if p.requires_grad]
    if not set(listed).issuperset(needed):
        add_masters(self)


def _check_dtypes(self: Any) -> None:
    for g, group in enumerate(self.optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            if param.requires_grad and param.dtype not in (*HALVES, torch.float32):
                raise TypeError(
                    f"FP16_Optimizer: param_groups[{g}]['params'][{i}] is {param.dtype} on "
                    f"{param.device}; expected float16, bfloat16 or float32."
                )


def clear_grads(self: Any, drop: bool) -> None:
    """Zero or drop the gradients of all that the optimizer steps on, and of the model."""
    own = [param for group in self.optimizer.param_groups for param in group["params"]]
    for param in (*own, *self.all_fp16_params):
        if drop:
            param.grad = None
        elif param.grad is not None:
            param.grad.detach_().zero_()


@torch.no_grad()
def rescale_grads(self: Any) -> None:
    """Bring gradients of earlier passes to the scale of the next one, which adds to them.

    Gradients of float32 parameters were unscaled in place, and the loss scale may have changed.
    """
    scale = self.loss_scale
    _multiply(self.all_fp16_params, scale / self._model_grads_scale)
    _multiply(self.all_fp32_from_fp32_params, scale / self._fp32_grads_scale)
    self._model_grads_scale = self._fp32_grads_scale = scale


@torch.no_grad()
def unscale_grads(self: Any) -> None:
    """Write the masters' gradients, unscale those of float32 parameters in place."""
    grads, master_grads = [], []
    for param, master in zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True):
        if param.grad is None:
            master.grad = None
            continue
        if master.grad is None:
            master.grad = torch.empty_like(master)
        grads.append(param.grad if param.grad.layout is torch.strided else param.grad.to_dense())
        master_grads.append(master.grad)
    if grads:
        self.loss_scaler.unscale(grads, master_grads, scale_override=self._model_grads_scale)
    own = [_dense_part(p) for p in self.all_fp32_from_fp32_params if p.grad is not None]
    if own:
        # With a dynamic scale they are tested for inf and NaN even if there is nothing to unscale.
        scale = self._fp32_grads_scale
        self.loss_scaler.unscale(own, own, models_are_masters=True, scale_override=scale)
    self._fp32_grads_scale = 1.0


def _multiply(params: list[Tensor], factor: float) -> None:
    if factor != 1.0:
        for param in params:
            if param.grad is not None:
                param.grad.mul_(factor)


def _dense_part(param: Tensor) -> Tensor:
    """The dense tensor that holds the gradient's numbers."""
    if not param.grad.is_sparse:
        return param.grad
    param.grad = param.grad.coalesce()
    return param.grad.values()
