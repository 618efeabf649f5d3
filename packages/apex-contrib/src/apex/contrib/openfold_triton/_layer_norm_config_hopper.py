"""Apex's settings of its Triton kernels on Hopper GPUs; none here is of Triton."""

from __future__ import annotations

from typing import Any

__all__ = ["_auto_tuned_config_hopper"]


def _auto_tuned_config_hopper(*arguments: Any, **options: Any) -> dict[str, Any]:
    """Settings by kernel: none, whatever is asked for."""
    return {}
