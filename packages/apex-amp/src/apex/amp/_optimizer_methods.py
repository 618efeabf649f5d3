"""The methods that replace an optimizer's own under amp: step, zero_grad and three more.

Each takes the optimizer; the original is in ``optimizer._amp_stash.originals``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from ._amp_state import _amp_state, maybe_print
from ._masters import HALVES, make_master

_CLOSURE_TEXT = (
    "amp: {name}.step was called with a closure, which is not supported {when}. Compute the loss, "
    "call backward in an amp.scale_loss block, and then call step without arguments."
)


def step(self: Any, closure: Callable | None = None, *args: Any, **kwargs: Any) -> Any:
    """Step with casts off; or do nothing after an overflow.

    With master weights: step on the masters, round them into the model, drop their gradients.

    Raises:
        RuntimeError: a closure is given, and there are master weights or the step is to be skipped.
    """
    stash = self._amp_stash
    if closure is not None and (stash.has_masters or stash.already_patched):
        when = "with master weights" if stash.has_masters else "after a gradient overflow"
        raise RuntimeError(_CLOSURE_TEXT.format(name=type(self).__name__, when=when))
    if stash.already_patched:
        return _skip(self)
    if stash.has_masters:
        self._amp_lazy_init()
    handle = getattr(_amp_state, "handle", None)
    with handle._disable_casts() if handle is not None else contextlib.nullcontext():
        arguments = args if closure is None and not args else (_with_casts(closure), *args)
        result = stash.originals["step"](*arguments, **kwargs)
    if handle is not None:
        handle._clear_cache()  # a step inside of a model's forward
    if stash.has_masters:
        if not stash.writes_model_params:
            self._master_params_to_model_params()
        _drop_master_grads(self)
    return result


def _with_casts(closure: Callable | None) -> Callable | None:
    """A closure is forward code: it runs with the casts that ``step`` switches off."""
    if closure is None:
        return None
    handle = getattr(_amp_state, "handle", None)

    def run() -> Any:
        with handle._enable_casts() if handle is not None else contextlib.nullcontext():
            return closure()

    return run


def _skip(self: Any) -> None:
    stash = self._amp_stash
    maybe_print(stash.skip_notice)
    stash.already_patched = False
    self._opt_called = True  # learning-rate schedulers warn where no step was called before theirs
    _drop_master_grads(self)
    if hasattr(self, "most_recent_scale"):  # FusedSGD, which did not get to reset it
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False


def _drop_master_grads(self: Any) -> None:
    for master in self._amp_stash.all_fp32_from_fp16_params:
        master.grad = None


def zero_grad(self: Any, set_to_none: bool = True) -> None:
    """Clear the gradients of the model's parameters and of the masters.

    Args:
        set_to_none: drop gradients instead of zeroing them in place, as in torch. Masters' are
            always dropped.
    """
    self._amp_lazy_init()
    stash = self._amp_stash
    frozen = [param for _, param in stash.frozen]
    for param in (*stash.all_fp16_params, *stash.all_fp32_from_fp32_params, *frozen):
        if set_to_none:
            param.grad = None
        elif param.grad is not None:
            param.grad.detach_().zero_()
    _drop_master_grads(self)


def add_param_group_with_masters(self: Any, new_group: dict[str, Any]) -> None:
    """Add a group of parameters; the optimizer receives masters of those in 16 bits.

    Raises:
        TypeError: not a dict, parameters in a set, or of a dtype that amp does not take.
    """
    params = _checked_params(new_group)
    self._amp_lazy_init()
    stash = self._amp_stash
    with torch.no_grad():
        masters = [make_master(p) if _needs_master(p) else p for p in params]
    # The original refuses some groups: the lists are extended after it has not.
    stash.originals["add_param_group"]({**new_group, "params": masters})
    fp16, from_fp16, from_fp32 = [], [], []
    for param, master in zip(params, masters, strict=True):
        if not param.requires_grad:
            stash.frozen.append((len(self.param_groups) - 1, param))
        elif master is param:
            from_fp32.append(param)
        else:
            fp16.append(param)
            from_fp16.append(master)
    stash.fp16_groups.append(fp16)
    stash.fp32_from_fp16_groups.append(from_fp16)
    stash.fp32_from_fp32_groups.append(from_fp32)
    stash.all_fp16_params += fp16
    stash.all_fp16_grad_stash += [None] * len(fp16)
    stash.all_fp32_from_fp16_params += from_fp16
    stash.all_fp32_from_fp32_params += from_fp32
    stash.all_fp32_from_fp32_grad_stash += [None] * len(from_fp32)


def add_param_group_no_masters(self: Any, new_group: dict[str, Any]) -> None:
    """Add a group of parameters, and see to the unscaling of their gradients.

    Raises:
        TypeError: as for :func:`add_param_group_with_masters`.
    """
    params = _checked_params(new_group)
    self._amp_lazy_init()
    stash = self._amp_stash
    stash.originals["add_param_group"]({**new_group, "params": params})
    for param in params:
        stash.enlist(param)


def _needs_master(param: torch.Tensor) -> bool:
    return param.requires_grad and param.dtype in HALVES


def _checked_params(new_group: Any) -> list[torch.Tensor]:
    if not isinstance(new_group, dict):
        raise TypeError(
            f"add_param_group: param_group must be a dict, got {type(new_group).__name__}."
        )
    params = new_group["params"]
    if isinstance(params, set):
        raise TypeError(
            "add_param_group: param_group['params'] must be ordered; got a set, whose order "
            "changes between runs. Use a list."
        )
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    for i, param in enumerate(params):
        if not isinstance(param, torch.Tensor) or param.dtype not in (*HALVES, torch.float32):
            got = param.dtype if isinstance(param, torch.Tensor) else type(param).__name__
            raise TypeError(
                f"add_param_group: param_group['params'][{i}] is {got}; optimizers under amp take "
                "float32, float16 and bfloat16 parameters."
            )
    return params


def load_state_dict(self: Any, state_dict: dict[str, Any]) -> Any:
    """Load state for the masters, so that float32 state is not rounded to 16 bits on the way."""
    self._amp_lazy_init()
    return self._amp_stash.originals["load_state_dict"](state_dict)


def replace_method(optimizer: Any, name: str, function: Callable) -> None:
    """Put ``function`` in the place of a method; attributes of the original (hooks') are kept."""
    original = getattr(optimizer, name)
    optimizer._amp_stash.originals[name] = original

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    # A bound method, because learning-rate schedulers wrap its __func__.
    setattr(optimizer, name, method.__get__(optimizer))
