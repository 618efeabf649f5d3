"""What the fused optimizers have in common: groups, states, checkpoints, and a step in buckets."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._shared.native.errors import check_is_no_module
from .._shared.native.writes import keep_from_tracing
from .buckets import MASTER, Bucket, StateLayout
from .checkpoints import complete_groups, load_state, outside_inference_mode, separate_steps
from .checks import (
    NOT_NEGATIVE,
    check_betas,
    check_duplicates,
    check_lr,
    check_not_negative,
    check_numbers,
    check_params,
    check_rounded,
    check_seed,
    require_kernels,
    state_dtype,
)
from .numbers import Scaling, advance_on_device, device_numbers, numbers_device
from .plan import BucketCache
from .step import Step


def is_capturing(groups: list[dict[str, Any]]) -> bool:
    """Whether any parameters are on a GPU while the current stream is captured in a CUDA graph."""
    return (
        torch.cuda.is_initialized()
        and torch.cuda.is_current_stream_capturing()
        and any(param.is_cuda for group in groups for param in group["params"])
    )


def amp_c_function(name: str) -> property:
    """A function of ``amp_C``, which subclasses written for Apex call as their own."""
    return property(lambda _: getattr(importlib.import_module("amp_C"), name))


_KEPT = ("set_grad_none", "capturable", "_step_supports_amp_scaling")


class FusedOptimizer(torch.optim.Optimizer):
    """Base of the optimizers here; a subclass checks hyper-parameters and steps one bucket.

    All gradients are checked, and all states made, before the first parameter changes.
    """

    layout: StateLayout  # of the class
    op: ClassVar[Step]
    # Attributes that the formula depends on; torch's own pickling would lose them.
    kept_attributes: ClassVar[tuple[str, ...]] = ()
    bucket_class: ClassVar[type[Bucket]] = Bucket
    # A group's option without which its states lack the last of the layout's moments.
    switch: ClassVar[str | None] = None

    set_grad_none = True
    capturable = False  # whether lr and step are on the device
    # Whether a captured step may be replayed all the same: its formula does not count steps.
    replayable: ClassVar[bool] = False
    # Whether a float32 lr on the GPU is read there, also where steps are counted on the host.
    reads_device_lr: ClassVar[bool] = False
    master_weights = False
    stochastic_rounding = False  # whether bfloat16 parameters are rounded by chance
    # What brings gradients of other devices, and sends parameters there: see cpu_offload.
    pipeline: Any = None
    _overflow_buffer: Tensor | None = None

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        check_is_no_module(self.layout.optimizer, params)
        keep_from_tracing(type(self))
        self._buckets = BucketCache()
        # If so, torch.amp.GradScaler sets grad_scale and found_inf instead of unscaling.
        self._step_supports_amp_scaling = self.capturable
        super().__init__(params, defaults)

    # What a subclass may change.

    def arguments(self, bucket: Bucket) -> dict[str, Any]:
        """The numbers of a bucket's step, by the names in its operator's schema."""
        group, count, lr = bucket.group, bucket.step_tensor, bucket.group["lr"]
        numbers = {**group, **self.op.unset}  # groups may have keys of a user's own
        if "betas" in self.defaults:
            numbers["beta1"], numbers["beta2"] = group["betas"]
        if self.capturable:
            numbers.update(device_numbers(self, bucket))
            return numbers
        if (
            self.reads_device_lr
            and isinstance(lr, Tensor)
            and lr.is_cuda
            and lr.dtype == torch.float32
        ):
            numbers["lr"], numbers["device_lr"] = 0.0, lr
        else:
            numbers["lr"] = float(lr)
        numbers["step"] = 1 + (bucket.count if count is None else int(count))
        return numbers

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise for the first hyper-parameter of a group that is no number, or out of range."""
        name = self.layout.optimizer
        check_lr(name, group["lr"])
        check_numbers(name, [group])
        if "betas" in self.defaults:
            check_betas(name, group["betas"])
        check_not_negative(name, group, [key for key in NOT_NEGATIVE if key in self.defaults])

    def check_saved_group(self, saved: dict[str, Any]) -> None:
        """Raise ValueError if a saved group is of another formula."""

    def keys_in(self, state: dict[str, Any]) -> list[str]:
        """Which moments, and whether a master, the state of a parameter has."""
        return [key for key in (*self.layout.moments, MASTER) if key in state]

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The moments that the parameters of a group have."""
        moments = self.layout.moments
        return moments if self.switch is None or group.get(self.switch) else moments[:-1]

    def kept_dtype(self, key: str, param: Tensor) -> torch.dtype:
        """Dtype in which a moment of a parameter, or its master if it has one, is kept."""
        return torch.float32 if key == MASTER else state_dtype(param)

    def init_state(self, group: dict[str, Any], param: Tensor) -> int:
        """Make what is missing of a parameter's state; return the number of steps it has taken."""
        state = self.state[param]
        is_new = not any(key in state for key in self.layout.moments)
        for key in self.state_keys(group):
            if key not in state:
                dtype = self.kept_dtype(key, param)
                state[key] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        if self.needs_master(param) and MASTER not in state:
            state[MASTER] = param.detach().clone().float()
        # States of Apex's optimizers have no step of their own.
        return int(state.get("step", 0 if is_new else group.get("step", 0)))

    def restore_moment(self, param: Tensor, key: str, value: Tensor) -> None:
        """Put a saved moment, or master, into the state, in the dtype in which it is kept."""
        dtype = self.kept_dtype(key, param)
        stored = torch.empty_like(param, dtype=dtype, requires_grad=False)
        self.state[param][key] = stored.copy_(value)

    def stored_value(self, param: Tensor, key: str) -> Tensor:
        """A moment, or master, as a number, whatever it is kept in."""
        return self.state[param][key]

    def conform_state(self, group: dict[str, Any], param: Tensor) -> None:
        """Give moments and master the dtype, device and layout that somebody else changed."""
        state = self.state.get(param, {})
        if MASTER in state and param.dtype not in (torch.float16, torch.bfloat16):
            del state[MASTER]  # the parameter is as exact now
        for key in (*self.state_keys(group), MASTER):
            if key not in state:
                continue
            kept = state[key]
            if kept.dtype != self.kept_dtype(key, param):
                self.restore_moment(param, key, self.stored_value(param, key))
            elif (kept.device, kept.stride()) != (param.device, param.stride()):
                like = torch.empty_like(param, dtype=kept.dtype, requires_grad=False)
                state[key] = like.copy_(kept)

    def needs_master(self, param: Tensor) -> bool:
        """Whether a float32 copy of a parameter is kept."""
        return self.master_weights and param.dtype in (torch.float16, torch.bfloat16)

    # The optimizer as its users see it.

    @property
    def _dummy_overflow_buf(self) -> Tensor:
        """int32 [1] on the device of the first parameter, where the functions look for it."""
        device = next((p.device for g in self.param_groups for p in g["params"]), None)
        buffer = self._overflow_buffer
        if buffer is None or device not in (None, buffer.device):
            buffer = self._overflow_buffer = torch.zeros(1, dtype=torch.int32, device=device)
        return buffer

    @_dummy_overflow_buf.setter
    def _dummy_overflow_buf(self, buffer: Tensor) -> None:
        self._overflow_buffer = buffer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see :meth:`torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: a hyper-parameter of the group is out of range, it has no ``lr``, or a
                parameter is there twice.
            TypeError: a parameter has a dtype that is not supported.
            RuntimeError: there are no kernels for the parameters, and none can be built.
        """
        self.check_group({**self.defaults, **param_group})
        before = len(self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        params = group["params"]
        try:
            check_params(self.layout.optimizer, params)
            check_duplicates(self.layout.optimizer, params)
            if self.stochastic_rounding:
                check_rounded(self.layout.optimizer, params)
                check_seed(self.layout.optimizer, group)
            require_kernels(self.layout.optimizer, self.op.folder, params)
        except (TypeError, ValueError, RuntimeError):
            del self.param_groups[before:]
            raise
        if self.capturable and not isinstance(group["lr"], Tensor):
            with outside_inference_mode():  # a captured step's lr is written to
                lr, device = float(group["lr"]), numbers_device(group)
                group["lr"] = torch.tensor(lr, dtype=torch.float32, device=device)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients: set them to None, or to zero.

        Args:
            set_to_none: defaults to the constructor's ``set_grad_none``.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buckets = BucketCache()
        complete_groups(self.param_groups, self.defaults)

    def __getstate__(self) -> dict[str, Any]:
        kept = (*_KEPT, *self.kept_attributes)
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def state_dict(self) -> dict[str, Any]:
        """The state; keys are those of the optimizer of the same formula in ``torch.optim``."""
        return separate_steps(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, of its counterpart in ``torch.optim``, or of Apex's.

        Moments keep their precision: they are not cast to the dtype of 16-bit parameters.

        Raises:
            ValueError: groups, or shapes of the state, do not fit. Nothing is changed then.
        """
        load_state(self, state_dict, super().load_state_dict)
        self._buckets = BucketCache()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; parameters without gradient are left alone.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            RuntimeError: a gradient cannot be used, or a CUDA graph is being captured of a step
                that is counted on the host; nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update_params()
        return loss

    def update_params(self) -> None:
        """Step all buckets, and hold nothing afterwards: gradients set to None are to be freed."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # a later step may be outside, and writes to states
                FusedOptimizer.update_params(self)
            return
        cache, is_grad_enabled = self._buckets, torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as a decorator it would take ten calls
        try:
            is_counted = self.stochastic_rounding or not self.replayable
            if is_counted and not self.capturable and is_capturing(self.param_groups):
                self._refuse_capture()
            check_numbers(self.layout.optimizer, self.param_groups, ".step")
            buckets = cache.collect(self)
            try:
                self.step_buckets(buckets)
            except RuntimeError:
                if not cache.is_outdated():
                    raise
                cache.forget()
                self.step_buckets(cache.collect(self))
        except BaseException:
            cache.roll_back(self.state)
            raise
        finally:
            cache.drop()
            torch._C._set_grad_enabled(is_grad_enabled)

    def _refuse_capture(self) -> None:
        """Raise RuntimeError: a graph would repeat this step's number in every replay."""
        remedy = f"Make it with {self.layout.optimizer}(..., capturable=True), or step"
        if self.replayable:
            remedy = "Step"
        raise RuntimeError(
            f"{self.layout.optimizer}.step: a CUDA graph is being captured, but this optimizer "
            "counts its steps on the host: every replay would use the same step number. "
            f"{remedy} outside the graph."
        )

    def step_buckets(self, buckets: list[Bucket]) -> None:
        """Update all parameters and count the step."""
        launches: list[tuple[Bucket, dict[str, Any], list[Any]]] = []
        for bucket in buckets:  # what is missing in a group is missed before one is stepped
            numbers, step = self.arguments(bucket), bucket.step
            values = list(step.read(numbers))
            for index in step.flags:
                values[index] = bool(values[index])
            if len(buckets) > 1:
                step.check(values)
            launches.append((bucket, numbers, values))
        if self.pipeline is not None:  # gradients that arrive first are used first
            launches.sort(key=lambda launch: self.pipeline.order(launch[0]))
        for bucket, numbers, values in launches:
            bucket.run(values)
            count = bucket.step_tensor
            if self.capturable:
                count.copy_(numbers["device_step"])
            elif count is None:
                bucket.count = numbers["step"]
            else:
                count.fill_(numbers["step"])
        if not self.layout.counts_group_steps:
            return
        # Groups without parameters or gradients count, too: other processes may have some, and
        # restore counts from what this one saves.
        if self.capturable:
            for group in self.param_groups:
                own = [bucket for bucket in buckets if bucket.group is group]
                advance_on_device(group, own, Scaling.of(self))
            return
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        if self.layout.counts_steps:
            for bucket in buckets:
                bucket.group["step"] = max(bucket.group["step"], int(bucket.step_tensor))
