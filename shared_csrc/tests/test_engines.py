"""Engines with trivial functors, and parts of packs, per ISA level and under sanitizers."""

import subprocess
import sys
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SHARED.parent))

from shared_csrc.native import targets, toolchain  # noqa: E402

SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"]


@pytest.mark.builds
@pytest.mark.parametrize(
    "program", ["engines", "engines_per_tensor", "groups", "samples", "windows"]
)
@pytest.mark.parametrize(
    ("level", "sanitize"),
    [*((level, False) for level in targets.supported_cpu_levels()), ("x86-64-v3", True)]
    if targets.is_x86()
    else [("baseline", False), ("baseline", True)],
)
def test_engines_agree_with_plain_loops(level, sanitize, program, tmp_path):
    flags = toolchain.compile_flags(targets.Target("cpu", level)) + (SANITIZERS if sanitize else [])
    binary = tmp_path / program
    source = Path(__file__).with_name(f"{program}.cpp")
    command = [*toolchain.find_cxx(), *flags, f"-I{toolchain.INCLUDE}", "-pthread"]
    subprocess.run([*command, str(source), "-o", str(binary)], check=True, timeout=300)
    result = subprocess.run([str(binary)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout.endswith("\n0 failures\n") or result.stdout == "0 failures\n"
