"""Parts of Megatron-style transformers, under Apex's names."""

from __future__ import annotations

import importlib
from typing import Any

from .enums import AttnMaskType, AttnType, LayerType

__all__ = ["AttnMaskType", "AttnType", "LayerType", "functional"]

_NOT_BUILT = ("amp", "parallel_state", "pipeline_parallel", "tensor_parallel", "utils")


def __getattr__(name: str) -> Any:
    if name == "functional":
        return importlib.import_module(f"{__name__}.functional")
    if name in _NOT_BUILT:
        raise AttributeError(f"{__name__}.{name} is not built yet: no known release has it.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
