"""Reads from the environment which prebuilt kernels a wheel should contain.

A variable that is set to "" or "0" is off, any other value is on.

============================  ===================================================================
``APEX_BUILD_CPP_OPS``        on: all CPU kernels, or the build fails; off: none
``APEX_BUILD_CUDA_OPS``       the same for a GPU: ROCm where torch is built for it, else CUDA
``APEX_BUILD_<NAME>``         on: this op, or the ops of this legacy module (``AMP_C``), and no
                              other of this wheel that is not demanded too; off: not this one. The
                              name of an op of another Apex package changes nothing
``APEX_CPP_EXT``              on: as ``APEX_BUILD_CPP_OPS``; off: as if unset. NVIDIA's names, and
                              weaker than the names above
``APEX_CUDA_EXT``             the same for ``APEX_BUILD_CUDA_OPS``
``APEX_ALL_<PACKAGE>_EXT``    the same for this package alone: ``APEX_ALL_CONTRIB_EXT``
``APEX_<NAME>``               the same for ``APEX_BUILD_<NAME>``, for NVIDIA's extensions
none of them                  CPU kernels where torch and a compiler are there, GPU kernels too
                              where torch is built for a GPU and its compiler is found
============================  ===================================================================
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path

from .build import Op, find_ops
from .errors import BuildError

SHARED = Path(__file__).resolve().parent.parent
# In an sdist: the names of all packages' ops and legacy modules when it was made.
NAMES_FILE = "build_names.txt"

CPP, CUDA = "CPP_OPS", "CUDA_OPS"
_PREFIX = "APEX_BUILD_"
_NO_SWITCH = "STRING"  # ROCm's: do not ask git for the version, which this build never does
_NVIDIA_GROUPS = {"APEX_CPP_EXT": CPP, "APEX_CUDA_EXT": CUDA}
_NVIDIA_SINGLES = (
    *("BNP", "CUDNN_GBN", "DEPRECATED_FUSED_ADAM", "DEPRECATED_FUSED_LAMB", "DISTRIBUTED_ADAM"),
    *("DISTRIBUTED_LAMB", "FAST_BOTTLENECK", "FAST_LAYER_NORM", "FOCAL_LOSS"),
    *("FUSED_CONV_BIAS_RELU", "GROUP_NORM", "INDEX_MUL_2D", "NCCL_ALLOCATOR", "NCCL_P2P"),
    *("PEER_MEMORY", "PERMUTATION_SEARCH", "TRANSDUCER", "XENTROPY"),
)


@dataclasses.dataclass
class Switches:
    """What the environment asks of one wheel.

    Args:
        groups: ``CPP`` and ``CUDA``, where they are set.
        demanded: the ops that are asked for by name.
        refused: the ops that are switched off by name.
        on: the variables that ask for something of this wheel.
        off: those that switch something of it off.
    """

    groups: dict[str, bool] = dataclasses.field(default_factory=dict)
    demanded: set[Op] = dataclasses.field(default_factory=set)
    refused: set[Op] = dataclasses.field(default_factory=set)
    on: list[str] = dataclasses.field(default_factory=list)
    off: list[str] = dataclasses.field(default_factory=list)


def read_switches(package_root: Path, environ: Mapping[str, str]) -> Switches:
    """Read the variables of the module's docstring for the wheel of ``package_root``.

    Raises:
        BuildError: an op is demanded that no Apex package has.
    """
    source_root = package_root.parent.parent
    ops = find_ops(source_root)
    switches = Switches()
    for variable, name, is_on in _variables(package_root.name, environ):
        named = set() if name in (CPP, CUDA) else _ops_called(name, ops, source_root)
        if name in (CPP, CUDA):
            switches.groups[name] = is_on
        elif is_on and not named and name not in _names_in(source_root) | known_names():
            raise BuildError(_unknown(package_root.name, variable, name, source_root))
        elif not named:
            continue
        elif is_on:
            switches.demanded |= named
        else:
            switches.refused |= named
        (switches.on if is_on else switches.off).append(variable)
    return switches


def switched_on(package: str, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """The variables that are on, whatever wheel they are for, each with the name that it asks for.

    Args:
        package: the name below ``apex``.
        environ: the environment.
    """
    return [(variable, name) for variable, name, is_on in _variables(package, environ) if is_on]


def known_names() -> set[str]:
    """The names of all Apex packages: of a checkout's, or as the sdist lists them.

    All five are built in one environment, so each must know the others' names to tell them from
    misspelt ones.
    """
    listed = SHARED / NAMES_FILE
    names = set(listed.read_text().split()) if listed.is_file() else set()
    for source_root in (SHARED.parent / "packages").glob("*/src"):
        names |= _names_in(source_root)
    return names


def _variables(package: str, environ: Mapping[str, str]) -> Iterator[tuple[str, str, bool]]:
    """Each variable that is a switch, the name that it switches, and whether it is on."""
    nvidia = {f"APEX_{name}": name for name in _NVIDIA_SINGLES} | _NVIDIA_GROUPS
    nvidia[f"APEX_ALL_{package.upper()}_EXT"] = CUDA
    for variable, name in nvidia.items():
        if environ.get(variable, "") not in ("", "0"):
            yield variable, name, True
    for variable, value in environ.items():
        name = variable.removeprefix(_PREFIX)
        if name not in (variable, _NO_SWITCH):
            yield variable, name, value not in ("", "0")


def _names_in(source_root: Path) -> set[str]:
    modules = {module.stem for module in source_root.glob("*.py")}
    return {name.upper() for name in modules | {op.name for op in find_ops(source_root)}}


def _unknown(package: str, variable: str, name: str, source_root: Path) -> str:
    own = _names_in(source_root)
    close = difflib.get_close_matches(name, sorted(own | known_names()), n=1)
    hint = f"Did you mean {_PREFIX}{close[0]}? " if close else ""
    return (
        f"apex.{package}: {variable} demands kernels, but no Apex package has an op or a module "
        f"{name}. {hint}This package has {', '.join(sorted(own))}. Correct the variable or unset "
        "it; if a newer Apex package has that name, set it for the build of that one alone."
    )


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
