"""Compiling small C++ programs against the headers, per ISA level or for the emulated GPU."""

import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SHARED.parent))

from shared_csrc.native import targets, toolchain  # noqa: E402


def pytest_generate_tests(metafunc):
    if "cpu_level" in metafunc.fixturenames:
        metafunc.parametrize("cpu_level", targets.supported_cpu_levels())


@pytest.fixture
def compile_cpp(tmp_path):
    """Return a function that compiles a source of this folder and gives the result's path.

    It takes the source's name, an ISA level and further flags; ``-S`` gives assembly. Where ``CXX``
    is a cross compiler, ``APEX_TEST_RUNNER`` is the command that starts its programs.
    """

    def compile_source(name: str, level: str, *flags: str) -> Path:
        out = tmp_path / f"{Path(name).stem}-{level}"
        common = [*toolchain.compile_flags(targets.Target("cpu", level)), f"-I{toolchain.INCLUDE}"]
        source = Path(__file__).with_name(name)
        command = [*toolchain.find_cxx(), *common, "-pthread", *flags, str(source), "-o", str(out)]
        subprocess.run(command, check=True, timeout=300)
        runner = os.environ.get("APEX_TEST_RUNNER")
        if runner and "-S" not in flags:  # a program for another kind of machine
            program = out.rename(out.with_suffix(".program"))
            out.write_text(f'#!/bin/sh\nexec {runner} {shlex.quote(str(program))} "$@"\n')
            out.chmod(0o755)
        return out

    return compile_source


@pytest.fixture(scope="session")
def compile_emulated():
    """Return a function that compiles sources with the emulator, and without torch.

    It takes a folder to work in and the sources, and gives the executable's path.
    """
    emulated = targets.Target("emu")

    def compile_program(folder: Path, *sources: Path) -> Path:
        own = [*toolchain.compile_flags(emulated), *toolchain.include_flags(emulated), "-Werror"]
        emulator = [f for f in toolchain.emulator_flags() if f != "-DAPEX_EMULATE_TENSORS"]
        units = [(source, own) for source in sources]
        units.append((toolchain.EMULATION / "runtime.cpp", emulator))

        def compile_one(unit) -> str:
            source, flags = unit
            target = str(folder / f"{source.stem}.o")
            command = [*toolchain.find_cxx(), *flags, "-c", str(source), "-o", target]
            result = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert result.returncode == 0, result.stderr[:5000]
            return target

        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(compile_one, units))
        program = folder / "program"
        wrapped = [f"-Wl,--wrap={name}" for name in ("memcpy", "memmove", "memset")]
        command = [*toolchain.find_cxx(), *objects, *wrapped, "-ldl", "-o", str(program)]
        subprocess.run(command, check=True, timeout=300)
        return program

    return compile_program
