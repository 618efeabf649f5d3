"""Kernels for OpenFold, under Apex's names: this package neither needs Triton nor uses it."""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from typing import Any

from .layer_norm import LayerNormSmallShapeOptImpl
from .mha import AttnBiasJIT, AttnNoBiasJIT, AttnTri, CanSchTriMHA

__all__ = [
    "AttnBiasJIT",
    "AttnNoBiasJIT",
    "AttnTri",
    "CanSchTriMHA",
    "LayerNormSmallShapeOptImpl",
    "decompositions",
    "sync_triton_auto_tune_cache_across_gpus",
]

_tuneable_triton_kernels: OrderedDict[str, Any] = OrderedDict()
"""Apex's kernels that are tuned as they run, by name; scripts look into their caches. None is."""


def decompositions() -> dict[Any, Any]:
    """The operators in ATen's, for ``ExportedProgram.run_decompositions``."""
    from . import attention, layer_norm

    return {**attention.decompositions(), **layer_norm.decompositions()}


def sync_triton_auto_tune_cache_across_gpus(strict: bool = True, verbose: bool = False) -> None:
    """Do nothing: kernels here are compiled ahead, and nothing about them is tuned as they run.

    Apex's are tuned at their first calls, and rank 0 sends what it has found to the others. Scripts
    call this function after a first step; they may leave it out.

    Args:
        strict, verbose: of no effect.
    """


def _save_triton_auto_tune_cache(strict: bool = True, verbose: bool = False) -> io.BytesIO:
    """What Apex would send to the other ranks: the JSON of no caches."""
    return io.BytesIO(json.dumps({}).encode())


def _load_triton_auto_tune_cache(f: Any, strict: bool = True, verbose: bool = False) -> None:
    """Read such JSON; with ``strict`` raise ValueError if it is of Apex's kernels."""
    names = sorted(json.load(f))
    if names and strict:
        raise ValueError(
            "_load_triton_auto_tune_cache: this is the cache of kernels that are not here, "
            f"{', '.join(names)}. Nothing is tuned here: leave the call out, or pass strict=False."
        )
