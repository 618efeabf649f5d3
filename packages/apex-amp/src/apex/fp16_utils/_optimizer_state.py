"""Checkpoints of ``FP16_Optimizer``."""

from __future__ import annotations

from typing import Any

import torch

from ..amp.scaler import LossScaler

_KEYS = (
    *("loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step"),
    *("optimizer_state_dict", "fp32_from_fp16"),
)


def state_dict(self: Any) -> dict[str, Any]:
    """See :meth:`FP16_Optimizer.state_dict`."""
    scaler = self.loss_scaler
    return {
        "loss_scaler": {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped},
        "dynamic_loss_scale": self.dynamic_loss_scale,
        "overflow": self.overflow,
        "first_closure_call_this_step": self.first_closure_call_this_step,
        "optimizer_state_dict": self.optimizer.state_dict(),
        "fp32_from_fp16": [[m.detach() for m in group] for group in self.fp32_from_fp16_groups],
    }


def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
    """See :meth:`FP16_Optimizer.load_state_dict`."""
    missing = [key for key in _KEYS if key not in state_dict]
    if missing:
        raise ValueError(
            f"FP16_Optimizer.load_state_dict: no entry {missing[0]!r}; expected the result of "
            f"FP16_Optimizer.state_dict(), with {', '.join(_KEYS)}."
        )
    loss_scale, unskipped = _parsed(state_dict["loss_scaler"])
    groups = state_dict["fp32_from_fp16"]
    _check_masters(self, groups)
    self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
    scaler = self.loss_scaler
    scaler._loss_scale, scaler._unskipped = loss_scale, unskipped
    scaler.dynamic = self.dynamic_loss_scale = bool(state_dict["dynamic_loss_scale"])
    self.overflow = bool(state_dict["overflow"])
    self.first_closure_call_this_step = bool(state_dict["first_closure_call_this_step"])
    with torch.no_grad():
        for masters, values in zip(self.fp32_from_fp16_groups, groups, strict=True):
            for master, value in zip(masters, values, strict=True):
                master.copy_(value)


def _parsed(entry: Any) -> tuple[float, int]:
    """The scale and count; checkpoints of older versions hold the scaler itself."""
    if isinstance(entry, LossScaler):
        return entry.loss_scale(), entry._unskipped
    try:
        loss_scale, unskipped = float(entry["loss_scale"]), int(entry["unskipped"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "FP16_Optimizer.load_state_dict: loss_scaler must be {'loss_scale': float, "
            f"'unskipped': int}}, got {entry!r}."
        ) from error
    if not loss_scale > 0 or unskipped < 0:
        raise ValueError(f"FP16_Optimizer.load_state_dict: loss_scaler is out of range: {entry!r}.")
    return loss_scale, unskipped


def _check_masters(self: Any, groups: Any) -> None:
    expected = [[list(master.shape) for master in group] for group in self.fp32_from_fp16_groups]
    got = [[list(value.shape) for value in group] for group in groups]
    if got != expected:
        raise ValueError(
            "FP16_Optimizer.load_state_dict: fp32_from_fp16 has tensors of shapes "
            f"{got}, but the masters are of {expected}."
        )
