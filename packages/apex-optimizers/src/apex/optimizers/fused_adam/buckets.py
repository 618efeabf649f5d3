"""Buckets: the parameters of a group that one launch can update, and their cached lists."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._gradients import check_gradients, match_layouts
from .held import HeldLists, adam_step_held, can_hold, is_eager, is_worth_holding
from .ops import adam_step

_States = tuple[list[Tensor], list[Tensor], list[Tensor]]
_MOMENTS, _MASTER = ("exp_avg", "exp_avg_sq"), "master_param"
_grad_of = operator.attrgetter("grad")


def state_dtype(param: Tensor) -> torch.dtype | None:
    """Dtype of the moments of a parameter; None if the parameter's dtype is not supported."""
    if param.dtype == torch.float64:
        return torch.float64
    if param.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return torch.float32
    return None


class Bucket:
    """Parameters of one group with one device, dtype and step count.

    ``step`` in the state of all parameters is one shared tensor, so that counting a step is one
    operation, whatever the number of parameters.
    """

    def __init__(self, group: dict[str, Any], params: list[Tensor], states: list[dict]) -> None:
        self.group = group
        self.params = params
        self.states = states
        self.step_tensor: Tensor = states[0]["step"]
        self.grads: list[Tensor] = []
        self._may_hold = is_worth_holding(params)
        self._kept: _States | None = None  # of the last step, if they may be held
        self._held: HeldLists | None = None  # params and _kept

    @property
    def step_number(self) -> int:
        return int(self.step_tensor)

    def set_step(self, step: int) -> None:
        self.step_tensor.fill_(step)

    def check(self) -> None:
        """Raise if a gradient cannot be used, before anything is changed."""
        check_gradients("FusedAdam.step", self.params, self.grads)

    def run(self, op: Callable[..., None], *hyper: Any) -> None:
        """Call a step operator on the lists; gradients of another layout are copied first."""
        states = self._current_states()
        held = self._held if op is adam_step and is_eager(self.grads) else None

        def call(grads: list[Tensor]) -> None:
            if held is None:
                op(self.params, grads, *states, *hyper)
            else:
                adam_step_held(held.number, grads, *hyper)

        try:
            call(self.grads)
        except (RuntimeError, NotImplementedError):
            self.check()
            matched = match_layouts(self.params, self.grads)
            if all(map(operator.is_, matched, self.grads)):
                raise
            call(matched)
            for own, copy in zip(self.grads, matched, strict=True):
                if own is not copy:
                    own.copy_(copy)
        # Autograd then notices a backward pass over values from before the step.
        torch.autograd.graph.increment_version(self.params)

    def _current_states(self) -> _States:
        """The lists of exp_avg, exp_avg_sq and masters; held from the second step with the same."""
        kept = self._kept
        if kept is None or not self._still_has(kept):
            exp_avgs, exp_avg_sqs = ([s[key] for s in self.states] for key in _MOMENTS)
            has_masters = _MASTER in self.states[0]
            masters = [s[_MASTER] for s in self.states] if has_masters else []
            states = exp_avgs, exp_avg_sqs, masters
            self._kept, self._held = states if self._may_hold else None, None
            return states
        if self._held is None and is_eager(self.grads):
            if can_hold(self.params, kept):
                self._held = HeldLists((self.params, *kept))
            else:
                self._may_hold, self._kept = False, None
        return kept

    def _still_has(self, states: _States) -> bool:
        """Whether the state of all parameters still consists of these very tensors."""
        if (_MASTER in self.states[0]) != bool(states[-1]):
            return False
        return all(
            all(map(operator.is_, map(operator.itemgetter(key), self.states), tensors))
            for key, tensors in zip((*_MOMENTS, _MASTER), states, strict=True)
            if tensors
        )


class BucketCache:
    """The buckets of all groups, rebuilt when parameters, gradients or states were replaced."""

    def __init__(self) -> None:
        self._groups: list[_GroupBuckets | None] = []

    def collect(self, optimizer: Any) -> list[Bucket]:
        """Buckets with this step's gradients, of all groups that have any."""
        buckets: list[Bucket] = []
        self._groups += [None] * (len(optimizer.param_groups) - len(self._groups))
        for index, group in enumerate(optimizer.param_groups):
            grads = list(map(_grad_of, group["params"]))
            missing = [grad is None for grad in grads]
            cached = self._groups[index]
            if cached is None or not cached.fits(optimizer, group, missing):
                cached = _GroupBuckets(optimizer, group, grads, missing)
                self._groups[index] = cached
            cached.set_grads(grads)
            buckets += cached.buckets
        return buckets


class _GroupBuckets:
    """The buckets of one group for one pattern of present gradients."""

    def __init__(
        self, optimizer: Any, group: dict[str, Any], grads: list[Tensor], missing: list[bool]
    ) -> None:
        self._group = group
        self._params = list(group["params"])
        self._missing = missing
        self._indices: list[list[int]] = []
        self.buckets: list[Bucket] = []
        present = [i for i, absent in enumerate(missing) if not absent]
        # Checked before any state is made: a gradient that cannot be used changes nothing.
        check_gradients(
            "FusedAdam.step", [self._params[i] for i in present], [grads[i] for i in present]
        )
        self._make(optimizer, present)
        self._state = optimizer.state
        self._state_size = len(optimizer.state)

    def fits(self, optimizer: Any, group: dict[str, Any], missing: list[bool]) -> bool:
        """Whether nothing that these buckets were made from has been replaced."""
        return (
            group is self._group
            and missing == self._missing
            and optimizer.state is self._state
            and len(optimizer.state) == self._state_size
            and len(group["params"]) == len(self._params)
            and all(map(operator.is_, group["params"], self._params))
        )

    def set_grads(self, grads: list[Tensor]) -> None:
        for bucket, indices in zip(self.buckets, self._indices, strict=True):
            bucket.grads = grads if len(indices) == len(grads) else [grads[i] for i in indices]

    def _make(self, optimizer: Any, present: list[int]) -> None:
        chosen: dict[tuple, list[int]] = {}
        for index in present:
            param = self._params[index]
            count = _init_state(optimizer, self._group, param)
            key = (param.device, param.dtype, "master_param" in optimizer.state[param], count)
            chosen.setdefault(key, []).append(index)
        for (device, *_, count), indices in chosen.items():
            params = [self._params[i] for i in indices]
            states = [optimizer.state[p] for p in params]
            shared = _step_tensor(optimizer.capturable, count, device)
            for state in states:
                state["step"] = shared
            self._indices.append(indices)
            self.buckets.append(Bucket(self._group, params, states))


def _step_tensor(capturable: bool, count: int, device: torch.device) -> Tensor:
    if capturable:
        return torch.tensor([count], dtype=torch.int32, device=device)
    return torch.tensor(float(count), dtype=torch.float32)  # as torch.optim keeps it, on the CPU


def _init_state(optimizer: Any, group: dict[str, Any], param: Tensor) -> int:
    """Make what is missing of a parameter's state; return the number of steps it has taken."""
    state = optimizer.state[param]
    if "exp_avg" not in state:
        state["step"] = 0
        state["exp_avg"] = torch.zeros_like(param, dtype=state_dtype(param))
        state["exp_avg_sq"] = torch.zeros_like(param, dtype=state_dtype(param))
    low_precision = param.dtype in (torch.float16, torch.bfloat16)
    if optimizer.master_weights and low_precision and "master_param" not in state:
        state["master_param"] = param.detach().clone().float()
    # States of Apex's FusedAdam have no step of their own.
    return int(state.get("step", group.get("step", 0)))
