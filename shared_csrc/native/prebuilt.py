"""Decides which kernels a wheel brings, builds them, and writes the manifest that lists them.

The environment decides. A variable that is set to "" or "0" is off, any other value is on.

==========================  =====================================================================
``APEX_BUILD_CPP_OPS``      on: all CPU kernels, or the build fails; off: none
``APEX_BUILD_CUDA_OPS``     the same for a GPU: ROCm where torch is built for it, else CUDA
``APEX_BUILD_<NAME>``       on: this op, or the ops of this legacy module (``AMP_C``), and no other
                            that is not demanded too; off: not this one
none of them                CPU kernels where torch and a compiler are there, GPU kernels too where
                            torch is built for a GPU and its compiler is found
==========================  =====================================================================
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import targets, toolchain
from .build import Op, build, find_ops, headers_digest
from .errors import BuildError
from .targets import Target

_PREFIX = "APEX_BUILD_"
_CPP, _CUDA = "CPP_OPS", "CUDA_OPS"


def demanded_names(environ: Mapping[str, str]) -> list[str]:
    """The names, without prefix, of the ``APEX_BUILD_`` variables that are on."""
    return [name for name, is_on in _switches(environ).items() if is_on]


def build_prebuilt(
    package_root: Path, output: Path, environ: Mapping[str, str]
) -> dict[str, Any] | None:
    """Compile the kernels that the environment asks for into ``output``.

    Args:
        package_root: the package's main folder, such as ``.../src/apex/optimizers``; ops are
            looked for in the whole of ``src``.
        output: the future ``_kernels`` folder; created when there is something to build.
        environ: the variables of the module's docstring.

    Returns:
        The manifest, which is also ``output/manifest.json``; None for a wheel of sources.

    Raises:
        BuildError: what was demanded cannot be built; the reason is the compiler's or names the
            missing tool.
    """
    package = f"apex.{package_root.name}"
    switches = _switches(environ)
    ops = _wanted_ops(package_root.parent.parent, switches)
    wanted = _wanted_targets(switches, environ) if ops else []
    if not wanted:
        return None
    libraries = []
    with tempfile.TemporaryDirectory(prefix="apex-build-") as work:
        built = build(ops, wanted, Path(work), package=package)
        output.mkdir(parents=True)
        for target, library in built.items():
            shutil.copy(library, output / library.name)
            libraries.append(_entry(target, ops))
    manifest = {"headers": headers_digest(), "libraries": libraries}
    (output / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def _switches(environ: Mapping[str, str]) -> dict[str, bool]:
    return {
        name.removeprefix(_PREFIX): value not in ("", "0")
        for name, value in environ.items()
        if name.startswith(_PREFIX)
    }


def _entry(target: Target, ops: list[Op]) -> dict[str, Any]:
    return {
        "file": f"{target.name}.so",
        "backend": target.backend,
        "level": target.level,
        "archs": list(target.archs),
        "ops": [op.name for op in ops],
        "compiler": toolchain.compiler_version(toolchain.compiler_for(target.backend)),
    }


def _wanted_ops(source_root: Path, switches: dict[str, bool]) -> list[Op]:
    """The ops that the switches leave: those named, or all where a group or nothing is named."""
    ops = find_ops(source_root)
    singles = {name: on for name, on in switches.items() if name not in (_CPP, _CUDA)}
    named = {name: _ops_called(name, ops, source_root) for name in singles}
    off = {op for name, on in singles.items() if not on for op in named[name]}
    demanded = {op for name, on in singles.items() if on for op in named[name]}
    only_singles = any(singles.values()) and not (switches.get(_CPP) or switches.get(_CUDA))
    return [op for op in ops if op not in off and (op in demanded or not only_singles)]


def _ops_called(name: str, ops: list[Op], source_root: Path) -> set[Op]:
    """The op of that name, or the ops that a legacy module of that name gives access to."""
    found = {op for op in ops if op.name.upper() == name}
    for module in source_root.glob("*.py"):
        if module.stem.upper() == name:
            imported = _imported_folders(module, source_root)
            found |= {op for op in ops if imported & {op.folder, *op.folder.parents}}
    return found


def _imported_folders(module: Path, source_root: Path) -> set[Path]:
    """The package folders that a module imports from, at whatever depth of its code."""
    names = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    folders = {source_root.joinpath(*name.split(".")) for name in names if name.count(".")}
    return {folder for folder in folders if folder.is_dir()}


def _wanted_targets(switches: dict[str, bool], environ: Mapping[str, str]) -> list[Target]:
    """CPU and GPU targets; what is not demanded is left out where its tools are not there."""
    singles = any(on for name, on in switches.items() if name not in (_CPP, _CUDA))
    wanted = []
    if switches.get(_CPP, True) and (switches.get(_CPP) or singles or _can_build("cpu")):
        wanted += [Target("cpu", level) for level in targets.cpu_levels()]
    gpu = _gpu_backend()
    if switches.get(_CUDA) or (_CUDA not in switches and gpu and _can_build(gpu)):
        wanted.append(_gpu_target(gpu or "cuda", environ))
    return wanted


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
