"""Builds the kernels that a wheel brings, and writes the manifest that lists them.

The environment decides which: see :mod:`.switches`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import targets, toolchain
from .build import Op, build, find_ops, headers_digest
from .errors import BuildError
from .switches import CPP, CUDA, Switches, read_switches
from .targets import Target


def build_prebuilt(
    package_root: Path, output: Path, environ: Mapping[str, str]
) -> dict[str, Any] | None:
    """Compile the kernels that the environment asks for into ``output``.

    Args:
        package_root: the package's main folder, such as ``.../src/apex/optimizers``; ops are
            looked for in the whole of ``src``.
        output: the future ``_kernels`` folder; created when there is something to build.
        environ: the variables that :mod:`.switches` lists.

    Returns:
        The manifest, which is also ``output/manifest.json``; None for a wheel of sources.

    Raises:
        BuildError: what was demanded cannot be built; the reason is the compiler's, or names the
            missing tool or the variable that forbids it.
    """
    package = f"apex.{package_root.name}"
    switches = read_switches(package_root, environ)
    ops = _wanted_ops(find_ops(package_root.parent.parent), switches)
    wanted = _wanted_targets(switches, environ) if ops else []
    if not wanted:
        if switches.demanded:
            on, off = " and ".join(switches.on), " and ".join(switches.off)
            raise BuildError(
                f"{package}: {on} demands kernels, but with {off} switched off there are none that "
                "can be compiled here. Unset one of them."
            )
        return None
    libraries = []
    # Inside an unpacked sdist relative paths are those of the last one: ccache knows the sources.
    inside = package_root.parents[2] if os.environ.get("APEX_COMPILER_LAUNCHER") else None
    with tempfile.TemporaryDirectory(prefix="apex-build-", dir=inside) as work:
        descriptor, log = tempfile.mkstemp(prefix="apex-build-", suffix=".log")
        os.close(descriptor)
        names, where = (", ".join(dict.fromkeys(x.name for x in xs)) for xs in (ops, wanted))
        print(f"{package}: compiling {names} for {where}", file=sys.stderr, flush=True)
        began = time.monotonic()
        folder, file = Path(work), Path(log)
        built = build(ops, wanted, folder, package=package, log=file, portable=True)
        print(f"{package}: compiled in {time.monotonic() - began:.0f} s", file=sys.stderr)
        os.unlink(log)  # it outlives a failure alone, whose message names it
        output.mkdir(parents=True)
        for target, library in built.items():
            shutil.copy(library, output / library.name)
            libraries.append(_entry(target, ops))
    manifest = {"headers": headers_digest(), "libraries": libraries}
    (output / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def _entry(target: Target, ops: list[Op]) -> dict[str, Any]:
    return {
        "file": f"{target.name}.so",
        "backend": target.backend,
        "level": target.level,
        "archs": list(target.archs),
        "toolkit": toolchain.toolkit_major(target.backend),  # CUDA's or ROCm's major version
        "ops": [op.name for op in ops],
        "compiler": toolchain.compiler_version(toolchain.compiler_for(target.backend)),
    }


def _wanted_ops(ops: list[Op], switches: Switches) -> list[Op]:
    """The ops that the switches leave: those demanded, or all where a group or none is."""
    only_demanded = bool(switches.demanded) and not any(switches.groups.values())
    wanted = switches.demanded if only_demanded else set(ops)
    return [op for op in ops if op in wanted - switches.refused]


def _wanted_targets(switches: Switches, environ: Mapping[str, str]) -> list[Target]:
    """CPU and GPU targets; what is not demanded is left out where its tools are not there."""
    wanted = []
    cpu = switches.groups.get(CPP)
    if cpu or (cpu is None and (switches.demanded or _can_build("cpu"))):
        wanted += [Target("cpu", level) for level in _wanted_levels(environ)]
        if sys.platform == "linux":  # GPUs, whose kernels are compiled at run time
            wanted.append(Target(toolchain.RTC))
    gpu = _gpu_backend()
    on_gpu = switches.groups.get(CUDA)
    if on_gpu or (on_gpu is None and gpu and _can_build(gpu)):
        wanted.append(_gpu_target(gpu or "cuda", environ))
    return wanted


def _wanted_levels(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The ISA levels that ``APEX_CPU_LEVELS`` names, best first; without it, all."""
    known = targets.cpu_levels()
    named = environ.get("APEX_CPU_LEVELS", "").replace(",", " ").split()
    for level in named:
        if level not in known:
            raise BuildError(
                f"APEX_CPU_LEVELS names {level!r}, but the levels of this kind of machine are "
                f"{', '.join(known)}. Name some of these, or unset it to build all."
            )
    return tuple(level for level in known if level in named) or known


def _can_build(backend: str) -> bool:
    """Whether torch, ninja and the backend's compiler are there; says on stderr what is not."""
    if importlib.util.find_spec("torch") is None:
        return False  # an isolated build: a wheel of sources is what it is meant to give
    try:
        toolchain.find_ninja()
        toolchain.compiler_for(backend)
    except BuildError as error:
        print(f"apex: the wheel will bring no {backend} kernels. {error}", file=sys.stderr)
        return False
    return True


def _gpu_backend() -> str | None:
    """What the installed torch is built for, read without importing it."""
    if importlib.util.find_spec("torch") is None:
        return None
    text = (toolchain.torch_root() / "version.py").read_text()
    for name in ("hip", "cuda"):
        if re.search(rf"^{name}\b[^=]*= *['\"]", text, re.M):
            return name
    return None


def _gpu_target(backend: str, environ: Mapping[str, str]) -> Target:
    if backend == "cuda":
        listed = environ.get("TORCH_CUDA_ARCH_LIST") or targets.DEFAULT_CUDA_ARCH_LIST
        return Target("cuda", archs=targets.cuda_arch_list(listed))
    listed = environ.get("PYTORCH_ROCM_ARCH") or targets.DEFAULT_ROCM_ARCHS
    return Target("hip", archs=tuple(listed.replace(";", " ").split()))
