"""Attributes with functions of ``amp_C``, which scripts written for Apex read from amp's objects.

The module belongs to apex-optimizers; amp's own kernels are in :mod:`apex.amp.multi_tensor`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class AmpCFunction:
    """A function of ``amp_C`` as an attribute; ``AttributeError`` without apex-optimizers.

    Args:
        name: of the function.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        try:
            import amp_C
        except ImportError as error:
            raise AttributeError(
                f"{owner.__name__}: {self.name} is a function of amp_C, which belongs to "
                f"apex-optimizers (pip install apex-optimizers) and cannot be imported: {error}"
            ) from error
        return getattr(amp_C, self.name)


class AmpCAttributes:
    """The attributes of ``amp_C`` that Apex keeps with an optimizer."""

    multi_tensor_scale = AmpCFunction("multi_tensor_scale")
    multi_tensor_l2norm = AmpCFunction("multi_tensor_l2norm")

    @functools.cached_property
    def dummy_overflow_buf(self) -> torch.Tensor:
        """An int32 ``[1]`` flag for these functions, on the accelerator if there is one."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return torch.zeros(1, dtype=torch.int32, device=accelerator or "cpu")
