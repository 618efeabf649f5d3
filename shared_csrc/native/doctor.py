"""``python -m apex.<package>``: what a package finds on this machine, and what to do about trouble.

Each wheel has it as a module of its own, so that it outlives the uninstall of another one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from . import compatibility, doctor_rtc, jit, switches, targets, toolchain, trust
from .build import Op
from .doctor_torch import (
    WHEELS,
    Trouble,
    first_lines,
    last_lines,
    parser,
    python_and_torch,
    torch_troubles,
    variable_lines,
)
from .errors import BuildError
from .library import OpLibrary

TRIAL_TIMEOUT_S = 120
# Whether torch's headers are there and the compiler understands them: what kernels begin with.
TRIAL = "#include <concepts>\n#include <torch/csrc/stable/library.h>\nint main() { return 0; }\n"


def main(
    library: OpLibrary, example: Callable[[str], None], arguments: list[str] | None = None
) -> int:
    """Print what there is; return 1 where ``--check`` or ``--build`` finds trouble, else 0.

    Args:
        library: the package's operators; all of its modules are imported.
        example: runs one op of the package on a device, ``"cpu"`` or ``"cuda"``; raises an error
            where that gives a wrong result.
        arguments: those of the command line.
    """
    options = parser(library.package).parse_args(arguments)
    failed_builds = list(_build_missing(library)) if options.build else []
    failed_builds += _compile_kernels(library, options)
    devices = _devices() if options.check else []
    checks = {device: _checked(example, device) for device in devices}
    facts = {**gather(library), "checks": checks}
    troubles = [*failed_builds, *find_troubles(library, facts)]
    facts["troubles"] = [dataclasses.asdict(trouble) for trouble in troubles]
    print(json.dumps(facts, indent=1) if options.json else report(facts))
    asked = options.check or options.build or options.compile
    return 1 if asked and any(trouble.is_fatal for trouble in troubles) else 0


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def gather(library: OpLibrary) -> dict[str, Any]:
    """Everything that the report shows, by name; of plain Python types."""
    return {
        **python_and_torch(library.package),
        "torch_for": _torch_for(),
        "cpu_levels": list(targets.supported_cpu_levels()),
        "gpu": _gpu(),
        "compilers": {name: _found(find) for name, find in _TOOLS.items()},
        "gpu_compiler": doctor_rtc.compiler(),
        "on_gpus": doctor_rtc.on_gpus(library),
        "trial": _trial(),
        "toolkit_problem": _toolkit_problem(),
        "kernels": {
            op: {device: _kernel(library, op, device) for device in _devices()}
            for op in sorted(library.op_folders)
        },
        "cache": _cache(),
        "other_apex": _other_apex(),
        "lacks_shared_file": _lacks_shared_file(),
        "without_effect": _without_effect(library),
    }


def _torch_for() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"


def _gpu() -> str | None:
    if not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties()
    arch = f"sm_{facts.major}{facts.minor}"
    if torch.version.hip:
        arch = jit.own_rocm_arch()
    count = torch.cuda.device_count()
    return f"{count} x {facts.name} ({arch}), driver {_driver()}"


def _driver() -> str:
    """The driver's version, or the CUDA version that it supports."""
    for file in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        try:
            return Path(file).read_text().splitlines()[0].strip()
        except OSError:
            continue
    return "unknown"


_TOOLS: dict[str, Callable[[], list[str]]] = {
    "C++": toolchain.find_cxx,
    "nvcc": lambda: toolchain.compiler_for("cuda"),
    "hipcc": lambda: toolchain.compiler_for("hip"),
    "ninja": lambda: [toolchain.find_ninja()],
}


def _found(find: Callable[[], list[str]]) -> str | None:
    """A tool's path and its version's line; None where it is not there."""
    try:
        command = find()
        lines = toolchain.compiler_version(command).splitlines()
    except BuildError:
        return None
    numbered = [line.strip() for line in lines if any(c.isdigit() for c in line)]
    said = next((line for line in numbered if "copyright" not in line.lower()), "no version")
    return f"{' '.join(command)} ({said})"


def _trial() -> str:
    """``"ok"``, or what a compilation against torch's headers says."""
    try:
        command = [*toolchain.find_cxx(), "-std=c++20", "-fsyntax-only"]
        command += toolchain.include_flags(targets.Target("cpu"))
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "trial.cpp")
            source.write_text(TRIAL)
            done = subprocess.run(
                [*command, str(source)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TRIAL_TIMEOUT_S,
                check=False,
            )
    except (BuildError, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return "ok"
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    return (lines or done.stderr.splitlines() or ["it failed without a word"])[0]


def _toolkit_problem() -> str | None:
    """Whether nvcc is of a newer CUDA than torch, which the driver may be too old for."""
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    try:
        major = toolchain.toolkit_major("cuda")
    except BuildError:
        return None
    here = compatibility.major(torch.version.cuda)
    if major is None or here is None or major <= here:
        return None
    return f"nvcc is of CUDA {major}, and this torch is for CUDA {here}: the driver may be too old"


def _kernel(library: OpLibrary, name: str, device: str) -> dict[str, str]:
    """Where the kernels of an op come from: ``state`` is prebuilt, cached, compiled or missing."""
    folder = library.op_folders[name]
    op = library.op_in(folder)
    prebuilt = library.find_prebuilt(op, device)
    if prebuilt is not None:
        return {"state": "prebuilt", "detail": prebuilt.name}
    reason = library.why_missing(folder, device)
    if reason is not None:
        return {"state": "missing", "detail": reason}
    try:
        path = jit.library_path(op, jit.target_of(device), package=library.package)
        if jit.is_cached(path):
            if trust.forbids_code(path):
                raise BuildError(
                    f"the file system of {path} forbids running code (noexec): set APEX_CACHE_DIR "
                    "to a folder on one that allows it"
                )
            return {"state": "cached", "detail": str(path)}
    except BuildError as error:
        return {"state": "missing", "detail": str(error)}
    return {"state": "compiled", "detail": "at the first use, in 10 to 70 s"}


def _cache() -> dict[str, Any]:
    try:
        folder = jit.cache_folder()
    except BuildError as error:
        return {"folder": None, "problem": str(error)}
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    problem = None
    if not there.is_dir():
        problem = f"{there} is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = f"{there} cannot be written"
    elif trust.forbids_code(there):
        problem = f"the file system of {there} forbids running code (noexec)"
    elif there == folder:
        try:
            trust.check_trusted(folder)
            trust.check_above(folder)
        except BuildError as error:
            problem = str(error)
    size = 0
    for file in (*folder.rglob("*.so"), *folder.rglob("*.kernel")):
        try:
            size += file.stat().st_size
        except OSError:
            continue
    return {"folder": str(folder), "mib": round(size / 2**20, 1), "problem": problem}


def _other_apex() -> str | None:
    """Another distribution that brings a module called apex, with its version."""
    for name in sorted(set(metadata.packages_distributions().get("apex", [])) | _named_apex()):
        if name.lower().replace("_", "-") not in WHEELS:
            return f"{name} {metadata.version(name)}"
    return None


def _lacks_shared_file() -> bool:
    """Whether apex/__init__.py is gone, which each wheel brings and takes along."""
    return getattr(sys.modules.get("apex"), "__file__", None) is None


def _without_effect(library: OpLibrary) -> list[str]:
    """The variables that ask for kernels in the wheel, where it was built without them."""
    backends = {entry["backend"] for entry in library.manifest().get("libraries", [])}
    wanted = {switches.CPP: {"cpu"}, switches.CUDA: {"cuda", "hip"}}
    wanted |= {op.upper(): {"cpu", "cuda", "hip"} for op in library.op_folders}
    is_editable = (library.kernels.parent / "_shared").is_symlink()
    on = [] if is_editable else switches.switched_on(library.kernels.parent.name, os.environ)
    return [variable for variable, name in on if name in wanted and not wanted[name] & backends]


def _named_apex() -> set[str]:
    try:
        metadata.version("apex")
    except metadata.PackageNotFoundError:
        return set()
    return {"apex"}


def find_troubles(library: OpLibrary, facts: dict[str, Any]) -> Iterator[Trouble]:
    """What does not work here, the worst first."""
    wheel = library.package.replace(".", "-")
    reinstall = "pip install --force-reinstall --no-deps"
    for device, said in facts["checks"].items():
        if said != "ok":
            yield Trouble(f"An op on {device} failed: {said}", "Do what that says, or report it")
    yield from torch_troubles(library.package, facts)
    if facts["other_apex"]:
        yield Trouble(
            f"{facts['other_apex']} is installed too, and its files lie among those of {wheel}.",
            f"Run: pip uninstall -y apex && {reinstall} {' '.join(facts['versions']) or wheel}",
        )
    elif facts["lacks_shared_file"]:
        yield Trouble(
            "An uninstall took apex/__init__.py along, which all Apex wheels bring: `import apex; "
            f"{library.package}` fails, and `from apex import {library.package[5:]}` works.",
            f"Run: {reinstall} {wheel}",
            is_fatal=False,
        )
    if facts["without_effect"]:
        yield Trouble(
            f"{' and '.join(facts['without_effect'])} had no effect, because pip took a wheel that "
            "was there already: from the package index or from its cache.",
            f"Run: {reinstall} --no-cache-dir --no-binary {wheel} {wheel}",
            is_fatal=False,
        )
    kernels = [(op, d, k) for op, ds in facts["kernels"].items() for d, k in ds.items()]
    missing = [(op, device, k["detail"]) for op, device, k in kernels if k["state"] == "missing"]
    if missing:
        op, device, reason = missing[0]
        count = f"{len(missing)} of {len(kernels)} kernels cannot run here; "
        yield Trouble(
            f"{count}{op} for {device}: {reason}.",
            f"Install a wheel with kernels (pip install {wheel}), or what the reason names",
        )
    if any(k["state"] == "compiled" for *_, k in kernels):
        yield from _compiling_troubles(library, facts)


def _compiling_troubles(library: OpLibrary, facts: dict[str, Any]) -> Iterator[Trouble]:
    """What is wrong where kernels are compiled at their first use."""
    if facts["cache"]["problem"]:
        yield Trouble(
            f"Kernels that are compiled here cannot be kept: {facts['cache']['problem']}.",
            "Set APEX_CACHE_DIR to a folder of your own on a file system that runs code",
        )
    if facts["toolkit_problem"]:
        yield Trouble(
            f"{facts['toolkit_problem']} for what is compiled here.",
            "Install a torch for that CUDA, or set CUDA_HOME to a toolkit for this torch",
            is_fatal=False,
        )
    if facts["trial"] != "ok":
        yield Trouble(
            f"The C++ compiler does not compile torch's headers: {facts['trial']}",
            "Install g++ 11 or later, or clang 14 or later, and name it with CXX",
        )
    else:
        yield Trouble(
            "Kernels are compiled at their first use, which takes some seconds each.",
            f"To do it now, run: python -m {library.package} --build",
            is_fatal=False,
        )


def _build_missing(library: OpLibrary) -> Iterator[Trouble]:
    """Compile into the cache what neither the wheel nor the cache has."""
    for target, is_prebuilt in _wanted_targets(library):
        for name, folder in sorted(library.op_folders.items()):
            op = library.op_in(folder)
            if is_prebuilt(op):
                continue
            try:
                jit.build_op(op, target, package=library.package)
            except BuildError as error:
                yield Trouble(f"{name} for {target.name}: {error}", "Read the text above")


def _wanted_targets(
    library: OpLibrary,
) -> Iterator[tuple[targets.Target, Callable[[Op], bool]]]:
    """What to compile for, and a function that says whether the wheel has an op for it."""
    for device in _devices():
        yield jit.target_of(device), lambda op, d=device: library.find_prebuilt(op, d) is not None
    if torch.cuda.is_available():
        return
    # An image is often made where no GPU is; the variables then say which ones it is for.
    cuda = doctor_rtc.listed_for_cuda()
    rocm = doctor_rtc.listed_for_rocm()
    if torch.version.cuda and cuda and jit.backend_of("cuda") == "cuda":
        yield targets.Target("cuda", archs=cuda), lambda op: False
    if torch.version.hip and rocm and jit.backend_of("cuda") == "hip":
        yield targets.Target("hip", archs=rocm), lambda op: False


def _compile_kernels(library: OpLibrary, options: argparse.Namespace) -> Iterator[Trouble]:
    """Compile into the cache every kernel that the package may launch on the wanted GPUs."""
    try:
        wanted = options.compile or (doctor_rtc.architectures() if options.build else [])
        if wanted:
            doctor_rtc.compile_kernels(library, wanted)
    except BuildError as error:
        yield Trouble(f"GPU kernels: {error}", "Do what that says")


def _checked(example: Callable[[str], None], device: str) -> str:
    """Run the example; ``"ok"``, or its error."""
    try:
        example(device)
    except Exception as error:  # whatever it is, the report shows it
        return f"{type(error).__name__}: {error}"
    return "ok"


def report(facts: dict[str, Any]) -> str:
    """The facts as lines for people; the last ones say what to do."""
    lines = [
        *first_lines(facts),
        f"  CPU         {', '.join(facts['cpu_levels'])}",
        f"  GPU         {facts['gpu'] or 'none that torch can use'}",
    ]
    for name, found in facts["compilers"].items():
        lines.append(f"  {name:<10}  {found or 'not found'}")
    compiler, maker = ("HIPRTC", "AMD") if torch.version.hip else ("NVRTC", "NVIDIA")
    lines.append(f"  {compiler:<10}  {facts['gpu_compiler']}")
    if facts["on_gpus"]:
        lines.append(f"  {maker + ' GPU':<10}  {facts['on_gpus']}")
    cache = facts["cache"]
    size = f", {cache['mib']} MiB" if cache.get("mib") else ""
    lines += [
        f"  compiles    {facts['trial']}",
        f"  cache       {cache['folder']}{size}",
        *variable_lines(facts),
        "",
        "kernels",
    ]
    width = max((len(op) for op in facts["kernels"]), default=0)
    for op, devices in facts["kernels"].items():
        for device, kernel in devices.items():
            lines.append(f"  {op:<{width}}  {device:<4}  {kernel['state']}: {kernel['detail']}")
    for device, said in facts["checks"].items():
        lines.append(f"\nan op on {device}: {said}")
    lines += ["", *last_lines(facts)]
    if not facts["troubles"]:
        lines.append(f"Everything that {facts['package']} has can run here.")
    return "\n".join(lines)


__all__ = ["Trouble", "find_troubles", "gather", "main", "report"]
