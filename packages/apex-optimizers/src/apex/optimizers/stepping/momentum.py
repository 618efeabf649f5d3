"""The base of optimizers with a momentum buffer, with or without master weights of amp."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .buckets import call_matched
from .checked import CheckedOptimizer
from .checkpoints import (
    check_saved_tensor,
    complete_groups,
    load_between_hooks,
    matching_params,
)
from .checks import check_lr, check_not_negative, check_numbers
from .held_lists import HeldOps
from .momentum_launches import BUFFER, GroupLaunches, Launch
from .optimizer import keep_from_tracing
from .state_order import StateOrder

# Attributes that the formula depends on, or that amp sets; torch's own pickling would lose them.
_ATTRIBUTES = (
    "wd_after_momentum",
    "materialize_master_grads",
    "set_grad_none",
    "most_recent_scale",
    "scale_set_by_backward",
)


class MomentumOptimizer(CheckedOptimizer):
    """Divides parameters into launches and keeps their buffers; a subclass runs one launch."""

    name: ClassVar[str]  # for messages
    held_ops: ClassVar[HeldOps | None] = None

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        wd_after_momentum: bool,
        materialize_master_grads: bool,
        set_grad_none: bool,
    ) -> None:
        keep_from_tracing(type(self))
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none
        # Set by amp: gradients are this many times too large in the next step.
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        self._forget_launches()
        super().__init__(params, defaults)

    # What a subclass supplies, or changes.

    def run_launch(self, launch: Launch, lr: float, device_lr: Tensor | None, scale: float) -> None:
        """Call the step's operator.

        Args:
            launch: the lists.
            lr, device_lr: the learning rate, or float32 on the device, used instead where given.
            scale: to multiply gradients by; negative to maximize.
        """
        raise NotImplementedError

    def buffer_dtype(self, param: Tensor) -> torch.dtype:
        """Dtype of the momentum buffer of a parameter."""
        return param.dtype

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for the first hyper-parameter of a group that is out of range."""
        check_lr(self.name, group["lr"])
        check_not_negative(self.name, group, ("momentum", "weight_decay"))
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"{self.name}: nesterov=True needs momentum > 0 and dampening = 0, got momentum "
                f"{group['momentum']} and dampening {group['dampening']}."
            )

    # The optimizer as its users see it.

    @property
    def _name(self) -> str:
        return self.name

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients: set them to None, or to zero.

        Args:
            set_to_none: as in torch; without it, see the constructor's ``set_grad_none``.
        """
        if set_to_none is not None:
            super().zero_grad(set_to_none)
        elif self.set_grad_none:
            super().zero_grad(True)
        else:
            super().zero_grad()

    def get_momentums(self, params: list[Tensor]) -> tuple[list[Tensor], bool]:
        """The momentum buffers of ``params``, made of zeros where missing.

        Returns:
            The buffers, and whether none of them existed, that is, the next step is the first.
            :meth:`step` does not use it: it knows per parameter which step is the first, and
            replaces buffers that are still zero then.
        """
        existing = [self.state[p].get(BUFFER) for p in params]
        for param, buffer in zip(params, existing, strict=True):
            if buffer is None:
                dtype = self.buffer_dtype(param)
                zeros = torch.zeros_like(param, dtype=dtype, requires_grad=False)
                self.state[param][BUFFER] = zeros
                self._unused.append((weakref.ref(param), weakref.ref(zeros)))
        buffers = [self.state[p][BUFFER] for p in params]
        return buffers, all(buffer is None for buffer in existing)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _ATTRIBUTES}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_launches()
        complete_groups(self.param_groups, self.defaults)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, of its counterpart in ``torch.optim``, or of Apex's.

        Raises:
            ValueError: groups, or shapes of the state, do not fit; or ``differentiable`` is set.
                Nothing is changed then.
        """

        def check(hooked: dict[str, Any]) -> Callable[[], None]:
            saved = self._checked_buffers(hooked)
            return lambda: self._restore_buffers(saved)

        load_between_hooks(self, state_dict, super().load_state_dict, check)

    def _checked_buffers(self, state_dict: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
        """The parameters with their saved buffers, none of which will fail to be restored."""
        if any(saved.get("differentiable") for saved in state_dict["param_groups"]):
            raise ValueError(
                f"{self.name}.load_state_dict: the state has differentiable=True; {self.name}'s "
                "step is not differentiable. Use torch.optim.SGD."
            )
        saved = [(p, entry.get(BUFFER)) for p, entry in matching_params(self, state_dict)]
        saved = [(param, buffer) for param, buffer in saved if buffer is not None]
        for param, buffer in saved:
            check_saved_tensor(self.name, param, BUFFER, buffer)
        return saved

    def _restore_buffers(self, saved: list[tuple[Tensor, Tensor]]) -> None:
        for param, buffer in saved:
            # torch casts to the parameter's dtype, or takes the very tensors of the state dict.
            own = torch.empty_like(param, dtype=self.buffer_dtype(param), requires_grad=False)
            self.state[param][BUFFER] = own.copy_(buffer)

    def update_params(self) -> None:
        """Run all launches; a step that fails changes nothing."""
        if self._unused:
            self._drop_unused()
        try:
            self._run_collected()
        except BaseException:
            self._forget_launches()  # divisions without their buffers must not be taken for old
            raise
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False

    def _drop_unused(self) -> None:
        """Take out buffers that nobody has written to: their parameters' first step is to come."""
        for param, buffer in [(param(), buffer()) for param, buffer in self._unused]:
            entry = self.state.get(param, {})
            if buffer is not None and entry.get(BUFFER) is buffer and not buffer.any():
                del entry[BUFFER]
        self._unused.clear()

    def _forget_launches(self) -> None:
        self._launches: list[GroupLaunches] = []
        self._order = StateOrder()
        self._unused: list[tuple[weakref.ref, weakref.ref]] = []  # buffers of get_momentums

    def _run_collected(self) -> None:
        check_numbers(self.name, self.param_groups)
        launches = self._collect()
        try:
            self._run_all(launches)
        except RuntimeError:
            if len(launches) != 1 or launches[0].is_new:
                raise
            # It may have refused parameters or buffers that were changed, see GroupLaunches.
            self._forget_launches()
            self._run_all(self._collect())

    def _run_all(self, launches: list[Launch]) -> None:
        for launch in launches:
            # If there is one launch, which is not new, its kernel checks everything itself.
            if launch.is_new:
                launch.check()
            elif len(launches) > 1:
                launch.check_gradients()
        for launch in launches:
            if len(launches) > 1 and not launch.is_new:
                launch.is_new = not launch.knows_buffers()
            if launch.is_new:
                launch.conform_buffers(self.buffer_dtype)
        for launch in launches:
            self._run(launch)

    def _collect(self) -> list[Launch]:
        twins = _models_of_masters(self)
        missing = len(self.param_groups) - len(self._launches)
        self._launches.extend(GroupLaunches(self.name, self.held_ops) for _ in range(missing))
        del self._launches[len(self.param_groups) :]  # of groups that were taken out
        is_same_state = self._order.update(self.state)
        values = [*self.state.values(), None]
        return [
            launch
            for group, launches in zip(self.param_groups, self._launches, strict=True)
            for launch in launches.collect(
                group,
                self._order,
                values,
                twins,
                not self.materialize_master_grads,
                is_same_state,
                len(self.param_groups) == 1,
            )
        ]

    def _run(self, launch: Launch) -> None:
        call_matched(self._bind(launch), launch.check, launch.sources, launch.grads)
        if launch.is_new:
            launch.keep_buffers(self.state)
        # Autograd then notices a backward pass over values from before the step.
        torch.autograd.graph.increment_version(launch.params + launch.copies)

    def _bind(self, launch: Launch) -> Callable[[list[Tensor]], None]:
        """The step of a launch as a function of the gradients alone."""
        lr, device_lr = launch.group["lr"], None
        if isinstance(lr, Tensor) and lr.is_cuda and lr.dtype == torch.float32:
            lr, device_lr = 0.0, lr
        scale = 1.0 / self.most_recent_scale
        if launch.group["maximize"]:
            scale = -scale

        def call(grads: list[Tensor]) -> None:
            launch.grads = grads
            self.run_launch(launch.on_shards(), float(lr), device_lr, scale)

        return call


def _models_of_masters(optimizer: MomentumOptimizer) -> dict[int, Tensor]:
    """The model's 16-bit parameter by ``id`` of the float32 master that amp made of it."""
    stash = getattr(optimizer, "_amp_stash", None)
    masters = getattr(stash, "fp32_from_fp16_groups", None)
    if masters is None:
        return {}
    return {
        id(master): model
        for master_group, model_group in zip(masters, stash.fp16_groups, strict=True)
        for master, model in zip(master_group, model_group, strict=True)
    }
