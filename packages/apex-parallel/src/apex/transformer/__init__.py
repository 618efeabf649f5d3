"""Parts of Megatron-style transformers, under Apex's names."""

from __future__ import annotations

import importlib
from typing import Any

from .enums import AttnMaskType, AttnType, LayerType

__all__ = ["AttnMaskType", "AttnType", "LayerType", "functional"]


def __getattr__(name: str) -> Any:
    if name == "functional":  # on first use: it loads this wheel's ops
        return importlib.import_module(f"{__name__}.functional")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
