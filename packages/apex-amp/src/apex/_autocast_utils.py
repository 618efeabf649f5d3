"""Casts to the dtype of autocast for autograd functions written by hand."""

from __future__ import annotations

from typing import Any

import torch

from .amp.casting.casts import applier

__all__ = ["_cast_if_autocast_enabled", "_get_autocast_dtypes", "_get_current_dtype"]


def _cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """The arguments, with floating-point tensors cast to the dtype of autocast where that is on.

    Args:
        *args: tensors inside of tuples, lists and dicts count; float64 ones are left as they are.

    Returns:
        As many values.
    """
    return applier(args, _cast)


def _cast(value: Any) -> Any:
    is_castable = (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type != "meta"  # which has no autocast
        and torch.is_autocast_enabled(value.device.type)
    )
    return value.to(torch.get_autocast_dtype(value.device.type)) if is_castable else value


def _get_autocast_dtypes() -> list[torch.dtype]:
    """The dtypes that autocast may be asked for: float16, and bfloat16 where it is supported."""
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        return [torch.half]
    return [torch.half, torch.bfloat16]


def _get_current_dtype(dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype of autocast if it is on, else ``dtype``, else float32."""
    for device_type in _device_types():
        if torch.is_autocast_enabled(device_type):
            return torch.get_autocast_dtype(device_type)
    return torch.float32 if dtype is None else dtype


def _device_types() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else [accelerator.type, "cpu"]
