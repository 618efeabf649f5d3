"""The methods that replace an optimizer's own under amp: step, zero_grad and three more.

Each takes the optimizer; the original is in ``optimizer._amp_stash.originals``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._amp_state import _amp_state, maybe_print
from ..casting.casts import HALVES
from .exact import make_master
from .owners import check_has_no_owner

_CLOSURE_TEXT = (
    "amp: {name}.step was called with a closure, which is not supported {when}. Compute the loss, "
    "call backward in an amp.scale_loss block, and then call step without arguments."
)


def step(self: Any, closure: Callable | None = None, *args: Any, **kwargs: Any) -> Any:
    """Step with casts off; or do nothing after an overflow, also one in the closure's first call.

    With master weights: step on the masters, round them into the model, drop their gradients.

    Raises:
        RuntimeError: a closure is given, and there are master weights or the step is to be skipped;
            or there is an overflow when the optimizer calls it again, having moved the parameters.
    """
    stash = self._amp_stash
    stash.check_is_delayed = False
    if closure is not None and (stash.has_masters or stash.already_patched):
        when = "with master weights" if stash.has_masters else "after a gradient overflow"
        raise RuntimeError(_CLOSURE_TEXT.format(name=type(self).__name__, when=when))
    if stash.already_patched:
        return _skip(self)
    if stash.has_masters:
        self._amp_lazy_init()
    handle = getattr(_amp_state, "handle", None)
    with handle._disable_casts() if handle is not None else contextlib.nullcontext():
        arguments = args if closure is None and not args else (_watched(self, closure), *args)
        try:
            result = stash.originals["step"](*arguments, **kwargs)
        except _ClosureOverflow as overflow:
            _skip(self)
            return overflow.loss
    if handle is not None:
        handle._clear_cache()  # a step inside of a model's forward
    if stash.has_masters:
        if not stash.writes_model_params:
            self._master_params_to_model_params()
        _drop_master_grads(self)
    return result


class _ClosureOverflow(Exception):
    """Ends a step that has called its closure and done nothing else."""

    def __init__(self, loss: Any) -> None:
        super().__init__(loss)
        self.loss = loss


def _watched(self: Any, closure: Callable | None) -> Callable | None:
    """A closure is forward code: it runs with the casts that ``step`` switches off.

    An overflow in it ends the step, which would write inf to the parameters.
    """
    if closure is None:
        return None
    handle, stash, calls = getattr(_amp_state, "handle", None), self._amp_stash, 0

    def run() -> Any:
        nonlocal calls
        calls += 1
        with handle._enable_casts() if handle is not None else contextlib.nullcontext():
            loss = closure()
        if stash.already_patched and calls == 1:
            raise _ClosureOverflow(loss)
        if stash.already_patched:
            stash.already_patched = False
            raise RuntimeError(
                f"amp: gradient overflow in call {calls} of the closure of {type(self).__name__}."
                "step. The step can be skipped at the first call only, because the optimizer then "
                "moves the parameters. Go back to a checkpoint, and use a lower static loss_scale, "
                "or O4, which has no loss scale."
            )
        return loss

    return run


def _skip(self: Any) -> None:
    stash = self._amp_stash
    maybe_print(stash.skip_notice)
    stash.already_patched = False
    self._opt_called = True  # learning-rate schedulers warn where no step was called before theirs
    _drop_master_grads(self)
    if hasattr(self, "most_recent_scale"):  # FusedSGD resets it in its own step, which was skipped
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
    if not stash.is_in_block:
        stash.drop_scaled_grads()
    frozen = [param for _, param in stash.frozen]
    for param in (*stash.all_fp16_params, *stash.all_fp32_from_fp32_params, *frozen):
        if set_to_none:
            param.grad = None
        elif param.grad is not None:
            param.grad.detach_().zero_()
    _drop_master_grads(self)


def zero_grad_no_masters(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Clear gradients, also what amp has put aside for a pass that delayed its unscaling."""
    stash = self._amp_stash
    if stash.params_have_scaled_gradients and not stash.is_in_block:
        stash.drop_scaled_grads()
    return stash.originals["zero_grad"](*args, **kwargs)


def add_param_group_with_masters(self: Any, new_group: dict[str, Any]) -> None:
    """Add a group of parameters; the optimizer receives masters of those in 16 bits.

    Raises:
        TypeError: not a dict, parameters in a set, or of a dtype that amp does not take.
        RuntimeError: another optimizer has one of the parameters, and one of both has masters.
    """
    params = _checked_params(new_group)
    has_masters = self._amp_stash.has_masters
    check_has_no_owner("add_param_group: param_group['params']", params, has_masters, besides=self)
    self._amp_lazy_init()
    stash = self._amp_stash
    masters = stash.masters()
    listed = set(masters)
    with torch.no_grad():
        for param in params:
            if id(param) not in masters:
                masters[id(param)] = make_master(param) if _needs_master(param) else param
    # The original may refuse the group, so the lists are extended afterwards.
    _add_to_original(self, new_group, [masters[id(param)] for param in params])
    for groups in (stash.fp16_groups, stash.fp32_from_fp16_groups, stash.fp32_from_fp32_groups):
        groups.append([])
    for param in params:
        if not param.requires_grad:
            stash.frozen.append((len(self.param_groups) - 1, param))
            continue
        is_new = id(param) not in listed
        listed.add(id(param))
        stash.enlist_with_master(-1, param, masters[id(param)], is_new)


def add_param_group_no_masters(self: Any, new_group: dict[str, Any]) -> None:
    """Add a group of parameters, and see to the unscaling of their gradients.

    Raises:
        TypeError, RuntimeError: as for :func:`add_param_group_with_masters`.
    """
    params = _checked_params(new_group)
    has_masters = self._amp_stash.has_masters
    check_has_no_owner("add_param_group: param_group['params']", params, has_masters, besides=self)
    self._amp_lazy_init()
    _add_to_original(self, new_group, params)
    self._amp_stash.enlist(params)


def _add_to_original(
    self: Any, new_group: dict[str, Any], stepped_on: Sequence[torch.Tensor]
) -> None:
    """Give the optimizer the group, which stays the caller's own dict; as it was on an error."""
    before = dict(new_group)
    pairs = zip(new_group["params"], stepped_on, strict=True)
    new_group["params"] = [(p[0], new) if isinstance(p, tuple) else new for p, new in pairs]
    try:
        self._amp_stash.originals["add_param_group"](new_group)
    except BaseException:
        new_group.clear()
        new_group.update(before)
        raise


def _needs_master(param: torch.Tensor) -> bool:
    return param.requires_grad and param.dtype in HALVES


def _checked_params(new_group: Any) -> list[torch.Tensor]:
    """The parameters of a group, whose entry ``"params"`` becomes a list."""
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
    new_group["params"] = params  # a generator can be read once
    # torch takes pairs of a name and a parameter, too.
    params = [p[1] if isinstance(p, tuple) and len(p) == 2 else p for p in params]
    for i, param in enumerate(params):
        if not isinstance(param, torch.Tensor) or param.dtype not in (*HALVES, torch.float32):
            got = param.dtype if isinstance(param, torch.Tensor) else type(param).__name__
            raise TypeError(
                f"add_param_group: param_group['params'][{i}] is {got}; optimizers under amp take "
                "float32, float16 and bfloat16 parameters."
            )
    return params


def replace_method(optimizer: Any, name: str, function: Callable) -> None:
    """Put ``function`` in the place of a method; attributes of the original (hooks') are kept."""
    original = getattr(optimizer, name)
    optimizer._amp_stash.originals[name] = original

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    # A bound method, because learning-rate schedulers wrap its __func__.
    setattr(optimizer, name, method.__get__(optimizer))
