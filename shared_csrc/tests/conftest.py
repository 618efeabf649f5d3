"""Compiling and running small C++ programs against the headers, per ISA level."""

import subprocess
import sys
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

    It takes the source's name, an ISA level and further flags; ``-S`` gives assembly.
    """

    def compile_source(name: str, level: str, *flags: str) -> Path:
        out = tmp_path / f"{Path(name).stem}-{level}"
        common = [*toolchain.compile_flags(targets.Target("cpu", level)), f"-I{toolchain.INCLUDE}"]
        source = Path(__file__).with_name(name)
        command = [*toolchain.find_cxx(), *common, "-pthread", *flags, str(source), "-o", str(out)]
        subprocess.run(command, check=True, timeout=300)
        return out

    return compile_source
