"""Compiles the planted bugs once, as kernels are compiled for the emulated GPU."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent.parent))

from shared_csrc.native import targets, toolchain  # noqa: E402

EMULATED = targets.Target("emu")


def compile_program(folder: Path, *sources: Path) -> Path:
    """Return an executable of ``sources`` with the emulator, and without torch."""
    own = [*toolchain.compile_flags(EMULATED), *toolchain.include_flags(EMULATED), "-Werror"]
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


@pytest.fixture(scope="session")
def planted(tmp_path_factory) -> Path:
    return compile_program(tmp_path_factory.mktemp("planted"), *sorted(HERE.glob("*.cpp")))
