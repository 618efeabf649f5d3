"""``FP16_Optimizer``: an optimizer with master weights and a loss scale, from before amp."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from ..amp._shared.native.master_owners import check_owner
from ..amp.masters.checks import is_optimizer
from ..amp.scaler import LossScaler
from . import _optimizer_state
from ._master_grads import add_masters, adopt_unfrozen, clear_grads, rescale_grads, unscale_grads
from .fp16util import clip_grad_norm, master_params_to_model_params

__all__ = ["FP16_Optimizer"]

_STATE_TEXT = "FP16_Optimizer cannot be {verb}; save and load its state_dict() instead."


class FP16_Optimizer:
    """Lets an optimizer step on float32 copies ("masters") of a model's 16-bit parameters.

    New scripts use ``amp.initialize(model, optimizer, opt_level="O2")``, which does the same and
    casts the model, too. The loop here is ``optimizer.zero_grad(); optimizer.backward(loss);
    optimizer.step()`` instead of ``loss.backward()``.

    Args:
        init_optimizer: over float16, bfloat16 and float32 parameters on any device. Changed in
            place: its parameter groups hold the masters afterwards, and its state moves to them.
        static_loss_scale: positive; used unless ``dynamic_loss_scale``.
        dynamic_loss_scale: adapt the scale to overflows.
        dynamic_loss_args: any of ``init_scale``, ``scale_factor``, ``scale_window``,
            ``min_loss_scale``, ``max_loss_scale`` of :class:`apex.amp.scaler.LossScaler`.
        verbose: print skipped steps.

    Attributes:
        optimizer: ``init_optimizer``.
        loss_scaler: the :class:`apex.amp.scaler.LossScaler`.
        overflow: whether the last :meth:`update_master_grads` found an inf or NaN; then
            :meth:`step` does nothing.
        fp16_groups, fp32_from_fp16_groups, fp32_from_fp32_groups: per parameter group: 16-bit
            parameters of the model, their masters, and float32 parameters.
        all_fp16_params, all_fp32_from_fp16_params, all_fp32_from_fp32_params: the same, flat.

    A call that raises changes nothing. Of two over the same 16-bit parameters only the newer one
    can be used: each would overwrite the model with masters of its own.

    Raises:
        TypeError: ``init_optimizer`` is not an optimizer, or a parameter has another dtype.
        ValueError: a loss scale or one of ``dynamic_loss_args`` is out of range.
    """

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if not is_optimizer(init_optimizer):
            raise TypeError(
                "FP16_Optimizer: init_optimizer must be a torch.optim.Optimizer, got "
                f"{type(init_optimizer).__name__}."
            )
        if dynamic_loss_scale:
            self.loss_scaler = LossScaler("dynamic", **(dynamic_loss_args or {}))
        else:
            self.loss_scaler = LossScaler(static_loss_scale)
        self.dynamic_loss_scale = dynamic_loss_scale
        self.verbose = verbose
        self.optimizer = init_optimizer
        self.overflow = False
        self.first_closure_call_this_step = True
        self.clip_grad_norm = clip_grad_norm
        # What the gradients at hand are multiplied by.
        self._model_grads_scale = self._fp32_grads_scale = 1.0
        self.all_fp16_params, self.all_fp32_from_fp16_params = [], []
        self.all_fp32_from_fp32_params = []
        add_masters(self)
        self.maybe_print(
            "FP16_Optimizer is kept for scripts that are older than amp; "
            'amp.initialize(model, optimizer, opt_level="O2") does the same with less code.'
        )

    def maybe_print(self, msg: str) -> None:
        """Print ``msg`` if ``verbose``."""
        if self.verbose:
            print(msg)

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(_STATE_TEXT.format(verb="pickled"))

    def __setstate__(self, state: Any) -> NoReturn:
        raise RuntimeError(_STATE_TEXT.format(verb="unpickled"))

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clear the gradients of masters and of the model's parameters.

        Args:
            set_grads_to_None: drop them instead of zeroing them in place.
        """
        clear_grads(self, set_grads_to_None)
        self._model_grads_scale = self._fp32_grads_scale = self.loss_scale

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Run the backward pass of the scaled loss; gradients add up until :meth:`zero_grad`.

        Args:
            loss: any shape that ``Tensor.backward`` takes; any floating-point dtype.
            update_master_grads: call :meth:`update_master_grads` afterwards. With several passes
                a step, False saves its work in all but the last; the sum is the same.
            retain_graph: as for ``Tensor.backward``.
        """
        check_owner(self, "FP16_Optimizer.backward")
        adopt_unfrozen(self)
        rescale_grads(self)
        (loss.float() * self.loss_scale).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Unscale the model's gradients into the masters', and look for an inf or NaN.

        Sets ``overflow``, and adapts a dynamic loss scale. Clip gradients after this.
        """
        check_owner(self, "FP16_Optimizer.update_master_grads")
        self.loss_scaler.clear_overflow_state()
        unscale_grads(self)
        self.overflow = self.loss_scaler.update_scale()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Tensor | float:
        """Clip the gradients that the optimizer is going to use, by their total norm.

        Args:
            max_norm: > 0; of unscaled gradients.
            norm_type: p of the p-norm; may be ``inf``.

        Returns:
            The total norm before clipping; -1 after an overflow, when nothing is clipped.
        """
        if self.overflow:
            return -1
        params = [param for group in self.param_groups for param in group["params"]]
        return self.clip_grad_norm(params, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The gradients that the optimizer is going to use, per parameter group.

        Returns:
            For each parameter its ``.grad.data`` or None; None instead of a list after an overflow.
        """
        if self.overflow:
            print(
                "Warning: FP16_Optimizer.inspect_master_grad_data: there was an overflow; the "
                "gradients are not meaningful, and the step is going to be skipped."
            )
            return None
        return [
            [None if param.grad is None else param.grad.data for param in group["params"]]
            for group in self.param_groups
        ]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on the masters and round them into the model; nothing after an overflow.

        Args:
            closure: clears gradients, computes the loss, calls :meth:`backward`, returns the loss.
                It is called again, at a smaller loss scale, while it overflows.

        Returns:
            What the wrapped optimizer's step returns; None after an overflow.

        Raises:
            RuntimeError: ``closure`` overflows at every loss scale; or a newer ``FP16_Optimizer``
                was built over 16-bit parameters of this one, as for :meth:`backward`.
        """
        check_owner(self, "FP16_Optimizer.step")
        if self.overflow:
            self.maybe_print(
                f"FP16_Optimizer: gradient overflow, skipping this step; the loss scale is now "
                f"{self.loss_scale}."
            )
            return None
        result = self.optimizer.step() if closure is None else self._step_with_closure(closure)
        self._master_params_to_model_params()
        return result

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def run() -> Any:
            if not self.first_closure_call_this_step:
                self._master_params_to_model_params()  # the optimizer has moved the masters
            self.first_closure_call_this_step = False
            result, scale = closure(), math.inf
            while self.overflow:
                if self.loss_scale >= scale or self.loss_scale < 2.0**-24:
                    raise RuntimeError(
                        "FP16_Optimizer.step: closure gives inf or NaN gradients at every loss "
                        f"scale down to {self.loss_scale}."
                    )
                scale = self.loss_scale
                self.maybe_print(
                    f"FP16_Optimizer: gradient overflow in closure, calling it again with loss "
                    f"scale {scale}."
                )
                result = closure()
            return result

        try:
            return self.optimizer.step(run)
        finally:
            self.first_closure_call_this_step = True

    def _master_params_to_model_params(self) -> None:
        master_params_to_model_params(self.all_fp16_params, self.all_fp32_from_fp16_params)

    def state_dict(self) -> dict[str, Any]:
        """Everything for a checkpoint besides the model: plain numbers and tensors.

        Returns:
            ``loss_scaler`` (its scale and count), ``dynamic_loss_scale``, ``overflow``,
            ``first_closure_call_this_step``, ``optimizer_state_dict`` and ``fp32_from_fp16`` (the
            masters, per parameter group). ``torch.load(weights_only=True)`` reads it.
        """
        return _optimizer_state.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; load the model's parameters with the model's own method.

        Args:
            state_dict: of an ``FP16_Optimizer`` over parameters of the same shapes, in any dtype.

        Raises:
            ValueError: an entry is missing, or the masters do not fit; nothing is changed then.
        """
        adopt_unfrozen(self)
        _optimizer_state.load_state_dict(self, state_dict)

    @property
    def loss_scale(self) -> float:
        """The factor by which the next loss is multiplied; may be assigned, from a string, too."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float | str) -> None:
        scale = float(value)
        if not (scale > 0 and math.isfinite(scale)):
            raise ValueError(
                f"FP16_Optimizer: loss_scale must be positive and finite, got {value!r}."
            )
        self.loss_scaler._loss_scale = scale

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups, which hold the masters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value
