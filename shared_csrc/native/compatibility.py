"""Whether a wheel's library suits this machine, and what helps where one cannot be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from . import jit, targets
from .drivers import compiler
from .errors import BuildError
from .toolchain import RTC


def why_incompatible(entry: dict[str, Any]) -> str | None:
    """Why a library of the wheel cannot be loaded or run here; None if it can."""
    backend, toolkit = entry["backend"], entry.get("toolkit")
    if backend == "cpu":
        levels = targets.supported_cpu_levels()
        return None if entry["level"] in levels else f"is for {entry['level']} processors"
    if backend == RTC:
        try:
            compiler()
        except BuildError as error:
            name = "HIPRTC" if torch.version.hip else "NVRTC"
            return f"needs {name}: {str(error).removesuffix('.')}"
        return None
    archs = ", ".join(entry["archs"])
    if backend == "cuda":
        here = major(torch.version.cuda)
        # An older library runs: it has its own runtime, and the driver suits torch's newer one.
        if toolkit and here and toolkit > here:
            return f"was compiled with CUDA {toolkit}, and this torch is for CUDA {here}"
        capability = torch.cuda.get_device_capability()
        if targets.runs_on(tuple(entry["archs"]), capability):
            return None
        return f"is for {archs}, and this GPU is sm_{capability[0]}{capability[1]}"
    here = major(torch.version.hip)
    if toolkit and here and toolkit != here:  # it needs libamdhip64.so of its own version
        return f"was compiled with ROCm {toolkit}, and this torch is for ROCm {here}"
    own = jit.own_rocm_arch()
    return None if own in entry["archs"] else f"is for {archs}, and this GPU is {own}"


def major(version: str | None) -> int | None:
    """The first number of a version such as 13.0; None without one."""
    head = (version or "").partition(".")[0]
    return int(head) if head.isdigit() else None


def remedy_for(reason: str, path: Path, *, is_own: bool) -> str:
    """What helps against the dynamic loader's complaint."""
    if "failed to map segment" in reason:
        help = "install the package" if is_own else "set APEX_CACHE_DIR to a folder"
        return f"Its file system forbids running code (noexec): {help} on one that allows it"
    if "cannot open shared object file" in reason or "undefined symbol" in reason:
        here = f"torch {torch.__version__}"
        if is_own:
            return f"Install a wheel that was compiled for what is here ({here}), or one of sources"
        return f"It was compiled for another installation than {here}; delete it, and try again"
    return "It is damaged: reinstall the package" if is_own else "It is damaged: delete it"
