"""Parts of Megatron-style transformers, under Apex's names."""

from __future__ import annotations

import importlib
from typing import Any

from .enums import AttnMaskType, AttnType, LayerType

# Imported on first use: each of them imports more, and `functional` loads this wheel's ops.
_MODULES = "amp", "functional", "parallel_state", "pipeline_parallel", "tensor_parallel", "utils"
__all__ = ["AttnMaskType", "AttnType", "LayerType", *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
