"""The base of optimizers with a momentum buffer, with or without master weights of amp."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor

from .buckets import Bucket, StateLayout
from .optimizer import FusedOptimizer

BUFFER = "momentum_buffer"  # torch.optim.SGD's name for it


def momentum_layout(optimizer: str) -> StateLayout:
    """A buffer per parameter and no counts, which is what torch.optim.SGD keeps."""
    return StateLayout(
        optimizer, (BUFFER,), counts_group_steps=False, counts_steps=False, has_copies=True
    )


class MomentumOptimizer(FusedOptimizer):
    """Keeps the buffers of parameters, and writes the model's 16-bit copies of amp's masters."""

    # The last two are set by amp.
    kept_attributes = (
        "wd_after_momentum",
        "materialize_master_grads",
        "most_recent_scale",
        "scale_set_by_backward",
    )
    switch = "momentum"
    replayable: ClassVar[bool] = True
    reads_device_lr: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        wd_after_momentum: bool,
        materialize_master_grads: bool,
        set_grad_none: bool,
    ) -> None:
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none
        # Set by amp: gradients are this many times too large in the next step.
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        self._unused: list[tuple[weakref.ref, weakref.ref]] = []  # buffers of get_momentums
        super().__init__(params, defaults)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"{self.layout.optimizer}: nesterov=True needs momentum > 0 and dampening = 0, got "
                f"momentum {group['momentum']} and dampening {group['dampening']}."
            )

    def linked(self, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], list]:
        """The parameters, those whose gradients are used, and copies or None; see `Members`."""
        params = group["params"]
        if not hasattr(self, "_amp_stash") or not (twins := _models_of_masters(self._amp_stash)):
            return params, params, []
        copies = [twins.get(id(p)) for p in params]
        if self.materialize_master_grads:
            return params, list(params), copies
        return params, [p if c is None else c for p, c in zip(params, copies, strict=True)], copies

    def init_state(self, group: dict[str, Any], param: Tensor) -> int:
        """Make the buffer, if there is to be one; return 0 where it is new, and not written."""
        if group["momentum"] == 0 or self.state[param].get(BUFFER) is not None:
            return 1
        dtype = self.kept_dtype(BUFFER, param)
        self.state[param][BUFFER] = torch.empty_like(param, dtype=dtype, requires_grad=False)
        return 0

    def arguments(self, bucket: Bucket) -> dict[str, Any]:
        numbers = super().arguments(bucket)
        numbers["first_run"] = numbers["step"] == 1
        sign = -1.0 if numbers["maximize"] else 1.0
        numbers["gradient_scale"] = sign / self.most_recent_scale
        return numbers

    # The optimizer as its users see it.

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients: set them to None, or to zero.

        Args:
            set_to_none: as in torch; without it, see the constructor's ``set_grad_none``.
        """
        if set_to_none is None and not self.set_grad_none:
            torch.optim.Optimizer.zero_grad(self)
        else:
            super().zero_grad(set_to_none)

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
                dtype = self.kept_dtype(BUFFER, param)
                zeros = torch.zeros_like(param, dtype=dtype, requires_grad=False)
                self.state[param][BUFFER] = zeros
                self._unused.append((weakref.ref(param), weakref.ref(zeros)))
        buffers = [self.state[p][BUFFER] for p in params]
        return buffers, all(buffer is None for buffer in existing)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._unused = []

    def check_saved_group(self, saved: dict[str, Any]) -> None:
        if saved.get("differentiable"):
            name = self.layout.optimizer
            raise ValueError(
                f"{name}.load_state_dict: the state has differentiable=True; {name}'s step is not "
                "differentiable. Use torch.optim.SGD."
            )

    def keys_in(self, state: dict[str, Any]) -> list[str]:
        return [BUFFER] if state.get(BUFFER) is not None else []  # torch.optim.SGD may have None

    def update_params(self) -> None:
        """Step all buckets; what amp said of gradients was said of these."""
        if self._unused:
            self._drop_unused()
        super().update_params()
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False

    def step_buckets(self, buckets: list[Bucket]) -> None:
        # The first step has no use for the buffer: nothing has been written to it.
        has_first = len(buckets) > 1 and any(bucket.count == 0 for bucket in buckets)
        super().step_buckets(buckets)
        if has_first:
            self._buckets.forget()  # those of one group may be one from now on

    def _drop_unused(self) -> None:
        """Take out buffers that nobody has written to: their parameters' first step is to come."""
        for param, buffer in [(param(), buffer()) for param, buffer in self._unused]:
            entry = self.state.get(param, {})
            if buffer is not None and entry.get(BUFFER) is buffer and not buffer.any():
                del entry[BUFFER]
        self._unused.clear()


def _models_of_masters(stash: Any) -> dict[int, Tensor]:
    """The model's 16-bit parameter by ``id`` of the float32 master that amp made of it."""
    masters = getattr(stash, "fp32_from_fp16_groups", None)
    if masters is None:
        return {}
    return {
        id(master): model
        for master_group, model_group in zip(masters, stash.fp16_groups, strict=True)
        for master, model in zip(master_group, model_group, strict=True)
    }
