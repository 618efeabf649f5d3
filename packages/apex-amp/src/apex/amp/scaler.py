"""The loss scaler: how much a loss is multiplied by, and the unscaling of its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .gradients.amp_c import AmpCFunction
from .gradients.unscale_python import (
    PythonUnscaling,
    axpby_check_overflow_python,
    scale_check_overflow_python,
)
from .masters.sharding import meshes_of, share_flags
from .multi_tensor.lists import axpby_lists, scale_lists

_Findings = tuple[tuple[Any, ...], bool, dict[torch.device, Tensor]]

__all__ = ["LossScaler", "axpby_check_overflow_python", "scale_check_overflow_python"]


class LossScaler(PythonUnscaling):
    r"""Keeps a loss scale, unscales gradients, and adapts the scale to overflows.

    With ``loss_scale="dynamic"`` the scale is divided by ``scale_factor`` after an iteration with
    an inf or NaN gradient, and multiplied by it after ``scale_window`` iterations without one.

    Args:
        loss_scale: a positive number, which never changes, or ``"dynamic"``.
        init_scale: first dynamic scale, if that is below ``max_loss_scale``.
        scale_factor: > 1.
        scale_window: consecutive iterations without overflow before the scale grows.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale; None is no bound.
        hysteresis: number of the overflow that divides the scale, counted from the last iteration
            without one. Earlier overflows skip the step and keep the scale; each later one divides
            the scale again.

    Raises:
        ValueError: an argument is out of range.

    Source:
        Micikevicius et al., *Mixed Precision Training*, ICLR 2018, section 3.2; hysteresis as in
        Megatron-LM's ``DynamicGradScaler``.
    """

    has_fused_kernel = True
    warned_no_fused_kernel = False
    multi_tensor_scale_cuda = AmpCFunction("multi_tensor_scale")
    multi_tensor_axpby_cuda = AmpCFunction("multi_tensor_axpby")

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
        *,
        hysteresis: int = 1,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        bounds = {"min_loss_scale": min_loss_scale, "max_loss_scale": max_loss_scale}
        bounds = {name: value for name, value in bounds.items() if value is not None}
        first_scale = {"init_scale": init_scale} if self.dynamic else {"loss_scale": loss_scale}
        _check_positive(first_scale | bounds)
        if not scale_factor > 1:
            raise ValueError(f"LossScaler: scale_factor must be above 1, got {scale_factor}.")
        if scale_window < 1:
            raise ValueError(f"LossScaler: scale_window must be at least 1, got {scale_window}.")
        if hysteresis < 1:
            raise ValueError(f"LossScaler: hysteresis must be at least 1, got {hysteresis}.")
        if max_loss_scale is not None and (min_loss_scale or 0) > max_loss_scale:
            raise ValueError(
                f"LossScaler: min_loss_scale ({min_loss_scale}) is above max_loss_scale "
                f"({max_loss_scale})."
            )
        self._loss_scale = float(init_scale if self.dynamic else loss_scale)
        if self.dynamic and max_loss_scale is not None:
            self._loss_scale = min(float(max_loss_scale), self._loss_scale)
        self._scale_factor = float(scale_factor)
        self._min_loss_scale = min_loss_scale
        self._max_loss_scale = max_loss_scale
        self._scale_seq_len = scale_window
        self._unskipped = 0
        self._hysteresis = hysteresis
        self._overflows_left = hysteresis  # until one divides the scale
        self._has_overflow = False
        self._overflow_bufs: dict[torch.device, Tensor] = {}
        # Findings of blocks with a delayed check: their optimizers, and the two above.
        self._delayed: dict[tuple[int, ...], _Findings] = {}
        self.late_overflows: list[Any] = []
        self._meshes: dict[Any, None] = {}  # over which the gradients are spread, in order

    def loss_scale(self) -> float:
        """The factor by which the next loss is multiplied."""
        return self._loss_scale

    def overflow_buf(self, device: torch.device) -> Tensor:
        """The int32 ``[1]`` flag on ``device`` that the kernels set to 1 on an inf or NaN."""
        if device not in self._overflow_bufs:
            self._overflow_bufs[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._overflow_bufs[device]

    @property
    def _overflow_buf(self) -> Tensor:
        """The flag of the device that was used first; on the CPU before any use."""
        for buffer in self._overflow_bufs.values():
            return buffer
        return self.overflow_buf(torch.device("cpu"))

    @_overflow_buf.setter
    def _overflow_buf(self, buffer: Tensor) -> None:
        # Scripts that unscale by themselves hand over the flag that they passed to amp_C.
        others = {
            d: b for d, b in vars(self).get("_overflow_bufs", {}).items() if d != buffer.device
        }
        self._overflow_bufs = {buffer.device: buffer, **others}

    def unscale(
        self,
        model_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        unused_scale: float | None = None,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """``master = model / scale`` for pairs of gradients; note an inf or NaN in ``model``.

        Does nothing after an overflow was found, nor for a static scale of 1 in place.

        Args:
            model_grads: dense gradients, any mix of dtypes, devices and layouts.
            master_grads: written; they may be the same tensors.
            unused_scale: ignored; kept for callers that pass it by position.
            models_are_masters: both lists hold the same tensors.
            scale_override: divide by this instead of the current loss scale.
        """
        if self._has_overflow:
            return
        scale = self._loss_scale if scale_override is None else scale_override
        if scale == 1.0 and models_are_masters and not self.dynamic:
            return
        self._meshes.update(dict.fromkeys(meshes_of(model_grads)))
        scale_lists(model_grads, master_grads, self.overflow_buf, 1.0 / scale)

    def unscale_with_stashed(
        self,
        model_grads: Sequence[Tensor],
        stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """``master = model * (out / grad) + stashed * (out / stash)``; test ``model`` for inf, NaN.

        Args:
            model_grads: new gradients, scaled by ``grad``.
            stashed_master_grads: gradients of earlier backward passes, scaled by ``stash``.
            master_grads: written; they may be the tensors of either list.
            scale_override: ``(grad, stash, out)``; default: the current loss scale, 1 and 1.
        """
        if self._has_overflow:
            return
        grad, stash, out = scale_override or (self._loss_scale, 1.0, 1.0)
        factors = out / grad, out / stash
        self._meshes.update(dict.fromkeys(meshes_of(model_grads)))
        axpby_lists(model_grads, stashed_master_grads, master_grads, self.overflow_buf, *factors)

    def clear_overflow_state(self) -> None:
        """Forget overflows, except those whose check is delayed."""
        self._has_overflow = False
        for buffer in self._overflow_bufs.values():
            buffer.zero_()

    def update_scale(self) -> bool:
        """Adapt the scale to the last backward pass; True if the step must be skipped.

        Reads the flags from their devices, which is the only synchronization of an iteration. A
        static scale never skips. Delayed checks are made, too: ``late_overflows`` is then the list
        of the optimizers in whose gradients they found an overflow.
        """
        delayed, self._delayed, self.late_overflows = self._delayed, {}, []
        should_skip = False
        if self.dynamic:
            self._has_overflow = should_skip = self._found(self._has_overflow, self._overflow_bufs)
            for optimizers, has_overflow, buffers in delayed.values():
                if self._found(has_overflow, buffers):
                    should_skip = True
                    self.late_overflows += optimizers
        if should_skip:
            self._overflows_left = max(self._overflows_left - 1, 0)
            if self._overflows_left == 0:
                smaller = self._loss_scale / self._scale_factor
                self._loss_scale = max(smaller, self._min_loss_scale or 0.0)
            self._unskipped = 0
        else:
            self._overflows_left = self._hysteresis
            self._unskipped += 1
        if self._unskipped == self._scale_seq_len and self.dynamic:
            larger = self._loss_scale * self._scale_factor
            limit = math.inf if self._max_loss_scale is None else self._max_loss_scale
            self._loss_scale = min(larger, limit)
            self._unskipped = 0
        return should_skip

    def delay_check(self, optimizers: Sequence[Any] = ()) -> None:
        """Keep the flags for gradients of ``optimizers`` until :meth:`update_scale`."""
        key = tuple(map(id, optimizers))
        _, has_overflow, flags = self._delayed.get(key, ((), False, {}))
        flags = {
            d: b | flags[d] if d in flags else b.clone() for d, b in self._overflow_bufs.items()
        }
        self._delayed[key] = tuple(optimizers), has_overflow or self._has_overflow, flags
        self.clear_overflow_state()

    def _found(self, has_overflow: bool, buffers: dict[torch.device, Tensor]) -> bool:
        if self._meshes:  # what one process found in its shards counts for all
            share_flags(buffers.values(), self._meshes)
        return has_overflow or any(map(torch.Tensor.item, buffers.values()))


def _check_positive(values: dict[str, float | str]) -> None:
    for name, value in values.items():
        number = float(value)
        if name == "min_loss_scale" and number == 0:
            continue
        if not (number > 0 and math.isfinite(number)):
            raise ValueError(f"LossScaler: {name} must be positive and finite, got {value!r}.")
