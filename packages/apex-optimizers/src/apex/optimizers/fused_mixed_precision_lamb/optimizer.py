"""The FusedMixedPrecisionLamb optimizer class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..fused_lamb.buckets import LambBucket
from ..fused_lamb.shared_step import WITH_MASTERS, LambOptimizer
from ..stepping.buckets import MASTER, StateLayout
from ..stepping.checkpoints import load_between_hooks, outside_inference_mode
from ..stepping.checks import check_lr
from ..stepping.numbers import Scaling, advance_on_device, lr_tensor, numbers_device
from ..stepping.optimizer import FusedOptimizer, amp_c_function
from .arguments import check_reduced_precision, check_step, given_grad_scaler


class FusedMixedPrecisionLamb(LambOptimizer):
    r"""LAMB for mixed precision: float32 masters, and numbers of a step on the device.

    The formula is that of :class:`apex.optimizers.FusedLAMB`, on the gradients divided by the loss
    scale. Gradients themselves are left as they are.

    Args:
        params: parameters, or dicts with parameter groups, as for every ``torch.optim`` optimizer.
            float64, float32, float16, bfloat16, complex64 or complex128, also mixed in a group; any
            shape; dense memory in any format.
        lr: learning rate, a number or a tensor of one element; ``>= 0``. Kept per group as float32
            on the device; numbers that a scheduler assigns are accepted.
        step: number of steps that the parameters have taken before; ``>= 0``.
        max_grad_norm: limit for the norm of the unscaled gradients of all groups together; ``>=
            0``; 0 or infinity does not clip. May differ between groups.
        use_nvlamb: use the ratio of norms also in groups without decay.
        reduced_precision_dtype: float16 or bfloat16: parameters of this dtype have a float32
            master, which is updated, and rounded into the parameter. It is made at the first step,
            after DistributedDataParallel has broadcast the weights. None: no masters.
        maximize: maximize instead of minimizing.

    Other arguments are those of :class:`apex.optimizers.FusedLAMB`.

    State, per parameter, same shape and memory format as the parameter:
        ``exp_avg``, ``exp_avg_sq``: float32, or of the parameter's dtype if that is float64 or
        complex; ``master_param``: float32, with ``reduced_precision_dtype`` (12 bytes per 16-bit
        parameter then, else 8); ``step``: int32 ``[1]``, steps that the parameter took.
        ``group["lr"]`` is float32 0-d, ``group["step"]`` int32 ``[1]``; both are on the device, so
        that a step can be captured in a CUDA graph. ``param_groups_full_precision`` lists the
        masters.

    Raises:
        ValueError: a hyper-parameter is out of range; in :meth:`load_state_dict`: the groups, or
            shapes of the state, do not fit.
        TypeError: a parameter has another dtype.
        RuntimeError: ``amsgrad``; in :meth:`step`: a gradient is sparse or does not match its
            parameter. No parameter and no state is changed then.

    Note:
        ``torch.amp.GradScaler.step(optimizer)`` passes loss scale and overflow flag on. If the flag
        is set, nothing is changed and no step is counted; the host does not wait for the device.
        Unlike Apex's: masters are part of the state; dtypes may differ within a group; all
        parameters may lack gradients; a step's own flag decides whether the step is counted. If you
        load weights into the model alone, the next step uses them instead of the masters.

    Source:
        You et al., *Large Batch Optimization for Deep Learning: Training BERT in 76 minutes*, ICLR
        2020, algorithm 2.

    Example:
        >>> model = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
        >>> optimizer = FusedMixedPrecisionLamb(
        ...     model.parameters(), reduced_precision_dtype=torch.bfloat16
        ... )
        >>> scaler = torch.amp.GradScaler("cpu")
        >>> loss = model(torch.randn(2, 8, dtype=torch.bfloat16)).square().mean()
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """

    layout = StateLayout(
        "FusedMixedPrecisionLamb",
        ("exp_avg", "exp_avg_sq"),
        has_masters=True,
        counts_group_steps=False,
    )
    kept_attributes = (*LambOptimizer.kept_attributes, "reduced_precision_dtype")
    op = WITH_MASTERS
    capturable = True
    multi_tensor_lamb = amp_c_function("multi_tensor_lamb_mp")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
        *,
        maximize: bool = False,
    ) -> None:
        check_lr("FusedMixedPrecisionLamb", lr)
        check_step(step)
        check_reduced_precision(reduced_precision_dtype)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        self.reduced_precision_dtype = reduced_precision_dtype
        defaults = {
            "lr": lr_tensor(lr),
            "step": torch.tensor([int(step)], dtype=torch.int32, device="cpu"),
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "maximize": maximize,
        }
        super().__init__(params, defaults, amsgrad)

    @property
    def param_groups_full_precision(self) -> list[dict[str, list[Tensor | None]]]:
        """Per group, the float32 master of each parameter, or None where there is none."""
        return [
            {"params": [self.state.get(p, {}).get(MASTER) for p in group["params"]]}
            for group in self.param_groups
        ]

    def needs_master(self, param: Tensor) -> bool:
        return param.dtype == self.reduced_precision_dtype

    def init_state(self, group: dict[str, Any], param: Tensor) -> int:
        is_new = "exp_avg" not in self.state[param]
        count = super().init_state(group, param)
        return int(self.defaults["step"]) if is_new else count

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        with outside_inference_mode():
            _own_numbers(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load = super().load_state_dict
        load_between_hooks(self, state_dict, load, lambda _: self._own_all_numbers)

    def _own_all_numbers(self) -> None:
        for group in self.param_groups:
            _own_numbers(group)

    def step(self, closure: Callable[[], Any] | None = None, *arguments: Any, **named: Any) -> Any:
        """Take one step.

        Args:
            closure: evaluates the model again and returns the loss.
            grad_scaler: a :class:`torch.amp.GradScaler`; then this is
                ``grad_scaler.step(optimizer)``, after ``closure`` if there is one. (It is not in
                the signature, because GradScaler would then pass itself, which torch has
                deprecated.)

        Returns:
            What ``closure`` returned, or None.

        Raises:
            TypeError: other arguments, or ``grad_scaler`` is no GradScaler.
            RuntimeError: a gradient cannot be used; nothing is changed then.
        """
        scaler = given_grad_scaler(*arguments, **named)
        if scaler is None:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_by(scaler)
        return loss

    def _step_by(self, scaler: torch.amp.GradScaler) -> None:
        """``scaler.step(self)``, which calls back past the hooks: they belong to the outer call."""
        patched = self.__dict__.get("step")  # by a learning rate scheduler
        self.step = functools.partial(FusedOptimizer.step, self)
        try:
            scaler.step(self)
        finally:
            del self.step
            if patched is not None:
                self.step = patched

    def step_buckets(self, buckets: list[LambBucket]) -> None:
        super().step_buckets(buckets)
        scaling = Scaling.of(self)
        for group in self.param_groups:  # also those without gradients, see FusedOptimizer
            advance_on_device(group, [], scaling)


def _own_numbers(group: dict[str, Any]) -> None:
    """Make ``lr`` and ``step`` tensors of this group alone, on its device."""
    device = numbers_device(group)
    lr, step = group["lr"], group["step"]
    group["lr"] = torch.as_tensor(lr, dtype=torch.float32, device=device).clone().reshape(())
    group["step"] = torch.as_tensor(step, dtype=torch.int32, device=device).clone().reshape(1)
