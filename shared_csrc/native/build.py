"""The one builder: ops and targets in, kernel libraries out, by one ninja file."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import shlex
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path

from . import toolchain
from .errors import BuildError
from .targets import Target

SHOWN_ERROR_LINES = 20
BUILD_TIMEOUT_S = 3600  # for a compiler that hangs: all kernels of a wheel take minutes
INTERRUPT_TIMEOUT_S = 5
OLD_LIBRARIES_OBJECT = "old_libraries.o"
NO_EXPORTS_FILE = "no_exports.map"


@dataclasses.dataclass(frozen=True)
class Op:
    """A folder whose ``<name>.cpp`` registers the kernels of one or a few operators.

    Further .cpp files in it are compiled beside that one, where one would take too long.
    """

    name: str
    folder: Path

    @property
    def source(self) -> Path:
        return self.folder / f"{self.name}.cpp"

    @property
    def sources(self) -> list[Path]:
        return sorted(self.folder.glob("*.cpp"), key=lambda path: path != self.source)

    def unit_name(self, source: Path) -> str:
        """What the object of one of the sources is called, before the target's name."""
        return self.name if source == self.source else f"{self.name}.{source.stem}"


def find_ops(source_root: Path) -> list[Op]:
    """All ops below ``source_root``: folders that hold a .cpp file of their own name."""
    found = [
        Op(path.stem, path.parent)
        for path in sorted(source_root.rglob("*.cpp"))
        if path.stem == path.parent.name and "_shared" not in path.parts
    ]
    names = [op.name for op in found]
    for name in names:
        if names.count(name) > 1:
            folders = ", ".join(str(op.folder) for op in found if op.name == name)
            raise BuildError(f"Two ops are called {name!r}: {folders}. Rename one.")
    return found


def digest(op: Op, target: Target) -> str:
    """Changes whenever a rebuild could give another library."""
    state = hashlib.sha256()
    files = sorted(op.folder.glob("*.cpp")) + sorted(op.folder.glob("*.h"))
    if target.backend == "emu":
        files += sorted(toolchain.EMULATION.iterdir())
    for path in files + sorted(toolchain.INCLUDE.rglob("*.h")):
        state.update(path.name.encode())
        state.update(path.read_bytes())
    compiler = toolchain.compiler_for(target.backend)
    # A home folder may be shared by machines of several kinds, whose compilers and flags agree.
    flags = [toolchain.compile_flags(target, toolchain.newest_ptx(file)) for file in op.sources]
    command = (platform.machine(), compiler[1:], flags)
    state.update(repr(command).encode())
    state.update(toolchain.compiler_version(compiler).encode())
    return state.hexdigest()[:16]


def headers_digest() -> str:
    """Identifies the vendored headers; recorded in the manifest of a wheel."""
    state = hashlib.sha256()
    for path in sorted(toolchain.INCLUDE.rglob("*.h")):
        state.update(path.read_bytes())
    return state.hexdigest()[:16]


def _escape(path: object) -> str:
    """A path as an input or output in a ninja file; ninja itself quotes it for the shell."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _command(*words: object) -> str:
    """Words of a command line in a ninja file, which go through a shell."""
    return shlex.join(map(str, words)).replace("$", "$$")


def _launcher() -> list[str]:
    """What runs the compiler: a cache of compilations, such as ccache, or nothing."""
    return shlex.split(os.environ.get("APEX_COMPILER_LAUNCHER", ""))


def _rules(target: Target, portable: bool) -> list[str]:
    compiler = _command(*_launcher(), *toolchain.compiler_for(target.backend))
    link_words = toolchain.link_flags(target)
    if portable:
        link_words += toolchain.portable_link_flags(target, NO_EXPORTS_FILE)
    link_rule = _command(*link_words)
    if target.backend == "hip":
        compiler = f"env HIP_PLATFORM=amd {compiler}"
    name = target.name
    return [
        f"rule compile_{name}",
        f"  command = {compiler} $flags -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        f"rule link_{name}",
        f"  command = {compiler} $in {link_rule} -o $out",
        "",
    ]


def _stub_rules(target: Target) -> list[str]:
    """Builds an empty library named like torch's GPU library, which the linker needs to see."""
    stub = toolchain.gpu_stub_name(target)
    cxx = _command(*toolchain.find_cxx())
    return [
        f"rule stub_{target.name}",
        f"  command = {cxx} -shared -fPIC -Wl,-soname,{stub} -x c++ $in -o $out",
        f"build {stub}: stub_{target.name} gpu_stub.cpp",
        "",
    ]


def _emulator_rules() -> list[str]:
    source = toolchain.EMULATION / "runtime.cpp"
    if not source.is_file():
        raise BuildError(
            "APEX_EMULATE is set, but the emulated GPU is a tool for tests that no wheel brings. "
            "Unset it, or work in a checkout."
        )
    compile_rule = _command(*_launcher(), *toolchain.find_cxx(), *toolchain.emulator_flags())
    return [
        "rule emulator",
        f"  command = {compile_rule} -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        f"build emulator.o: emulator {_escape(source)}",
        "",
    ]


def _old_libraries_rules() -> list[str]:
    """Compiles what keeps a wheel's libraries loadable on older systems."""
    flags = toolchain.old_libraries_flags()
    compile_rule = _command(*toolchain.find_cxx(), *flags)
    return [
        "rule old_libraries",
        f"  command = {compile_rule} -c $in -o $out",
        f"build {OLD_LIBRARIES_OBJECT}: old_libraries {_escape(toolchain.OLD_LIBRARIES)}",
        "",
    ]


def _write_ninja(
    ops: list[Op], targets: list[Target], folder: Path, portable: bool, headers: Path | None
) -> None:
    first = [f"-I{headers.resolve()}"] if headers else []
    lines = ["ninja_required_version = 1.8", ""]
    if portable:
        (folder / NO_EXPORTS_FILE).write_text(toolchain.NO_EXPORTS)
        lines += _old_libraries_rules()
    for target in targets:
        lines += _rules(target, portable)
        stub = toolchain.gpu_stub_name(target)
        if stub is not None and f"build {stub}" not in "\n".join(lines):
            lines += _stub_rules(target)
            (folder / "gpu_stub.cpp").write_text(
                'extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }\n'
            )
        objects = [OLD_LIBRARIES_OBJECT] if portable else []
        if target.backend == "emu":
            lines += _emulator_rules()
            objects.append("emulator.o")
        for op in ops:
            own = [f"-I{op.folder.resolve()}"]
            own += toolchain.path_flags(target, op.folder, folder.resolve())
            for source in op.sources:
                flags = toolchain.compile_flags(target, toolchain.newest_ptx(source))
                flags += [*first, *toolchain.include_flags(target), *own]
                if target.backend == toolchain.RTC:
                    flags.append(f'-DAPEX_RTC_UNIT="{op.unit_name(source)}"')
                objects.append(f"{op.unit_name(source)}.{target.name}.o")
                lines += [
                    f"build {objects[-1]}: compile_{target.name} {_escape(source.resolve())}",
                    f"  flags = {_command(*flags)}",
                ]
        needs = f" | {stub}" if stub else ""
        lines += [f"build {target.name}.so: link_{target.name} {' '.join(objects)}{needs}", ""]
    (folder / "build.ninja").write_text("\n".join(lines))


def _first_errors(output: str) -> str:
    """The lines that say what went wrong first; compilers print the cause before its effects."""
    lines = output.splitlines()
    for index, line in enumerate(lines):
        if "error" in line.lower() and not line.startswith(("FAILED", "ninja:")):
            return "\n".join(lines[index : index + SHOWN_ERROR_LINES])
    return "\n".join(lines[-SHOWN_ERROR_LINES:])


def build(
    ops: Iterable[Op],
    targets: Iterable[Target],
    folder: Path,
    *,
    package: str,
    log: Path | None = None,
    portable: bool = False,
    headers: Path | None = None,
) -> dict[Target, Path]:
    """Compile all ``ops`` for each target and link one library per target.

    Args:
        ops: the ops whose sources are compiled.
        targets: what to compile for.
        folder: where the ninja file, objects and libraries go; kept for incremental builds.
        package: the package's name, for messages.
        log: the file that the compilers' output goes to; ``<folder>/build.log`` by default.
        portable: whether the libraries must load on systems older than this one, as a wheel's must.
        headers: a folder whose headers, such as ``apex/core/gpu_shapes.h``, replace ours.

    Returns:
        The library of each target, ``<folder>/<target name>.so``.

    Raises:
        BuildError: a tool is missing, or a compilation failed; with the first error lines.
    """
    ops, targets = list(ops), list(targets)
    folder.mkdir(parents=True, exist_ok=True)
    _write_ninja(ops, targets, folder, portable, headers)
    command = [toolchain.find_ninja(), "-C", str(folder)]
    max_jobs = os.environ.get("MAX_JOBS", "")
    if max_jobs:
        if not max_jobs.isdigit() or int(max_jobs) < 1:
            raise BuildError(f"MAX_JOBS must be a positive integer, got {max_jobs!r}.")
        command += ["-j", max_jobs]
    code, output = _run(command)
    log = log or folder / "build.log"
    log.write_text(output)
    built = {target: folder / f"{target.name}.so" for target in targets}
    if code != 0 or not all(library.is_file() for library in built.values()):
        names = ", ".join(op.name for op in ops)
        backends = ", ".join(target.name for target in targets)
        said = _first_errors(output) if code else "The compiler reported success, wrote no library."
        raise BuildError(
            f"{package}: compiling {names} ({backends}) failed.\n{said}\nFull output: {log}"
        )
    return built


def _run(command: list[str]) -> tuple[int, str]:
    """Run ninja; return its exit status and output. No compiler goes on after an exception."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=BUILD_TIMEOUT_S)
    except BaseException as error:
        process.send_signal(signal.SIGINT)  # ninja then ends its compilers
        try:
            process.wait(INTERRUPT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return 1, f"error: the compiler did not end within {BUILD_TIMEOUT_S} s; it was ended."
        raise
    return process.returncode, output
