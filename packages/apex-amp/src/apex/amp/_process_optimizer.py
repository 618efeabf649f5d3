"""Gives an optimizer master weights, unscaling and skipped steps, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .casting.casts import HALVES
from .casting.levels import Properties
from .gradients import backward
from .gradients.backward import (
    post_backward_models_are_masters,
    post_backward_no_master_weights,
    post_backward_no_master_weights_FusedSGD,
    post_backward_with_master_weights,
    post_backward_with_master_weights_FusedSGD,
    prepare_backward_no_master_weights,
    prepare_backward_no_master_weights_FusedSGD,
    prepare_backward_with_master_weights,
    prepare_backward_with_master_weights_FusedSGD,
)
from .gradients.stash import AmpOptimizerState
from .masters import optimizer_methods, optimizer_state
from .masters.exact import make_master
from .masters.owners import note_owner
from .multi_tensor.lists import scale_lists

__all__ = [
    "AmpOptimizerState",
    "lazy_init_no_master_weights",
    "lazy_init_with_master_weights",
    "post_backward_models_are_masters",
    "post_backward_no_master_weights",
    "post_backward_no_master_weights_FusedSGD",
    "post_backward_with_master_weights",
    "post_backward_with_master_weights_FusedSGD",
    "prepare_backward_no_master_weights",
    "prepare_backward_no_master_weights_FusedSGD",
    "prepare_backward_with_master_weights",
    "prepare_backward_with_master_weights_FusedSGD",
]

_ADDED_METHODS = (
    "_lazy_init_maybe_master_weights",
    "_master_params_to_model_params",
    "_prepare_amp_backward",
    "_post_amp_backward",
    "_abort_amp_backward",
    "_amp_lazy_init",
)
_FUSED_SGD_ATTRIBUTES = ("materialize_master_grads", "most_recent_scale", "scale_set_by_backward")


def is_fused_sgd(optimizer: Any) -> bool:
    """Whether the optimizer can unscale gradients and write the model's parameters itself."""
    return all(map(hasattr, [optimizer] * len(_FUSED_SGD_ATTRIBUTES), _FUSED_SGD_ATTRIBUTES))


def _check_params(groups: list[dict[str, Any]], masters: bool) -> None:
    for g, group in enumerate(groups):
        for i, param in enumerate(group["params"]):
            if param.is_meta:
                raise RuntimeError(
                    f"amp: param_groups[{g}]['params'][{i}] is on the meta device. to_empty() "
                    "gives a model new parameters, which this optimizer does not have: make the "
                    "optimizer afterwards, and pass both to amp.initialize."
                )
            is_left_alone = masters and not param.requires_grad
            if not is_left_alone and param.dtype not in (*HALVES, torch.float32):
                raise TypeError(
                    f"amp: param_groups[{g}]['params'][{i}] is {param.dtype} on {param.device}; "
                    "optimizers under amp take float32, float16 and bfloat16 parameters. Call "
                    "model.float() before you make the optimizer, or give this parameter to an "
                    "optimizer that amp does not see."
                )


def lazy_init_with_master_weights(self: Any) -> None:
    """Replace 16-bit parameters in the groups by float32 masters; state moves to the masters.

    This is done late, so that the masters include changes of the model between ``initialize`` and
    training, such as a loaded checkpoint or a broadcast from another process.

    Raises:
        TypeError: a parameter that needs gradients is not float32, float16 or bfloat16.
    """
    stash = self._amp_stash
    _check_params(self.param_groups, masters=True)
    masters: dict[int, torch.Tensor] = {}
    for index, group in enumerate(self.param_groups):
        for name in ("fp16_groups", "fp32_from_fp16_groups", "fp32_from_fp32_groups"):
            getattr(stash, name).append([])
        group["params"] = [_master_of(self, index, p, masters) for p in group["params"]]
    if self.state:  # in the dtype of the parameters, which has changed
        optimizer_state.load_state(self, self.state_dict())


def _master_of(
    self: Any, group: int, param: torch.Tensor, masters: dict[int, torch.Tensor]
) -> torch.Tensor:
    """Put a parameter into the lists; returns what the optimizer steps on instead of it.

    Args:
        self: the optimizer.
        group: index of the parameter's group.
        param: of the model.
        masters: those of the parameters in the lists; a new one is added.
    """
    stash = self._amp_stash
    if not param.requires_grad:
        stash.frozen.append((group, param))
        return param
    is_new = id(param) not in masters
    if is_new:
        masters[id(param)] = make_master(param) if param.dtype in HALVES else param
    master = masters[id(param)]
    stash.enlist_with_master(group, param, master, is_new)
    if master is not param and param in self.state:
        self.state[master] = self.state.pop(param)
    return master


def lazy_init_no_master_weights(self: Any) -> None:
    """Sort parameters into 16-bit and float32 ones.

    Raises:
        TypeError: a parameter is neither.
    """
    _check_params(self.param_groups, masters=False)
    for group in self.param_groups:
        self._amp_stash.enlist(group["params"])


def _amp_lazy_init(self: Any) -> None:
    """Sort the parameters if that has not been done, and take in those unfrozen since."""
    stash = self._amp_stash
    if not stash.lazy_init_called:
        with torch.no_grad():
            self._lazy_init_maybe_master_weights()
        stash.lazy_init_called = True
    elif stash.frozen and any(param.requires_grad for _, param in stash.frozen):
        _adopt_unfrozen(self)


def _adopt_unfrozen(self: Any) -> None:
    """Give masters to parameters that were frozen when the lists were made, and are not now."""
    frozen, self._amp_stash.frozen = self._amp_stash.frozen, []
    masters = self._amp_stash.masters()
    with torch.no_grad():
        for index, param in frozen:
            replacement = _master_of(self, index, param, masters)
            params = self.param_groups[index]["params"]
            params[:] = [replacement if p is param else p for p in params]


def _master_params_to_model_params(self: Any) -> None:
    """Round the masters into the model's parameters."""
    stash = self._amp_stash
    ignored: dict[torch.device, torch.Tensor] = {}

    def flag_of(device: torch.device) -> torch.Tensor:
        if device not in ignored:
            ignored[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return ignored[device]

    if stash.all_fp16_params:
        with torch.no_grad():
            scale_lists(stash.all_fp32_from_fp16_params, stash.all_fp16_params, flag_of, 1.0)


def _prepare_amp_backward(self: Any) -> None:
    stash = self._amp_stash
    stash.is_prepared = True
    stash.hooks = _hooks(self)
    stash.hooks[0](self)


def _post_amp_backward(self: Any, scaler: Any) -> None:
    hooks, was_enabled = self._amp_stash.hooks or _hooks(self), torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # as torch.no_grad() does in seven frames
    try:
        hooks[1](self, scaler)
    finally:
        torch._C._set_grad_enabled(was_enabled)
    self._amp_stash.is_prepared = False


def _abort_amp_backward(self: Any) -> None:
    """Put back the gradients of before a backward pass that failed."""
    stash = self._amp_stash
    if not stash.is_prepared or stash.params_have_scaled_gradients:
        return
    stash.is_prepared = False
    is_stashed = not stash.has_masters or not getattr(self, "materialize_master_grads", True)
    if is_stashed:
        backward.restore_grads(stash.all_fp16_params, stash.all_fp16_grad_stash)
    else:
        for param in stash.all_fp16_params:
            param.grad = None
    backward.restore_grads(stash.all_fp32_params, stash.all_fp32_grad_stash)
    backward.restore_grads(stash.all_fp32_from_fp32_params, stash.all_fp32_from_fp32_grad_stash)


def _hooks(self: Any) -> tuple[Callable, Callable]:
    """What to do before and after a backward pass."""
    masters = "with" if self._amp_stash.has_masters else "no"
    is_fused = hasattr(self, _FUSED_SGD_ATTRIBUTES[0]) and is_fused_sgd(self)
    kind = f"backward_{masters}_master_weights{'_FusedSGD' if is_fused else ''}"
    return getattr(backward, f"prepare_{kind}"), getattr(backward, f"post_{kind}")


def check_is_unprocessed(optimizer: Any) -> None:
    """Raise ``RuntimeError`` if the optimizer has an attribute that amp is going to add."""
    for name in ("_amp_stash", *_ADDED_METHODS):
        if hasattr(optimizer, name):
            raise RuntimeError(
                f"amp.initialize: {type(optimizer).__name__} already has an attribute {name}. An "
                "optimizer can be initialized once; make a new one to start again."
            )


def _process_optimizer(optimizer: Any, properties: Properties) -> Any:
    """Add the stash and amp's methods to ``optimizer``, and replace some of its own; returns it.

    Raises:
        RuntimeError: it has been processed before; nothing is changed then.
    """
    check_is_unprocessed(optimizer)
    stash = optimizer._amp_stash = AmpOptimizerState()
    stash.has_masters = bool(properties.master_weights)
    stash.writes_model_params = stash.has_masters and is_fused_sgd(optimizer)
    lazy_init = lazy_init_with_master_weights if stash.has_masters else lazy_init_no_master_weights
    methods = {
        "_lazy_init_maybe_master_weights": lazy_init,
        "_amp_lazy_init": _amp_lazy_init,
        "_prepare_amp_backward": _prepare_amp_backward,
        "_post_amp_backward": _post_amp_backward,
        "_abort_amp_backward": _abort_amp_backward,
    }
    replaced = {
        "step": optimizer_methods.step,
        "zero_grad": optimizer_methods.zero_grad_no_masters,
        "add_param_group": optimizer_methods.add_param_group_no_masters,
        "load_state_dict": optimizer_state.load_state_dict,
    }
    if stash.has_masters:
        methods["_master_params_to_model_params"] = _master_params_to_model_params
        replaced["zero_grad"] = optimizer_methods.zero_grad
        replaced["add_param_group"] = optimizer_methods.add_param_group_with_masters
    for name, function in methods.items():
        setattr(optimizer, name, function.__get__(optimizer))
    for name, function in replaced.items():
        optimizer_methods.replace_method(optimizer, name, function)
    note_owner(optimizer)
    return optimizer
