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
    "program",
    ["engines", "engines_per_tensor", "groups", "samples", "several_rows", "windows"],
)
@pytest.mark.parametrize(
    ("level", "flags"),
    [
        *(pytest.param(level, [], id=level) for level in targets.supported_cpu_levels()),
        pytest.param("x86-64-v3" if targets.is_x86() else "baseline", SANITIZERS, id="sanitized"),
    ],
)
def test_engines_agree_with_plain_loops(level, flags, program, compile_cpp):
    binary = compile_cpp(f"{program}.cpp", level, *flags)
    result = subprocess.run([str(binary)], capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout.endswith("\n0 failures\n") or result.stdout == "0 failures\n"


@pytest.mark.builds
def test_terms_without_memory_do_not_compile():
    """Once with_terms() of such a program wrote through a null pointer."""
    flags = [*toolchain.compile_flags(targets.Target("cpu", "baseline")), f"-I{toolchain.INCLUDE}"]
    source = Path(__file__).with_name("windows.cpp")
    command = [*toolchain.find_cxx(), *flags, "-fsyntax-only", "-DWITHOUT_TERMS", str(source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode != 0
    assert "needs `static constexpr bool kKeepsTerms = true;`" in result.stderr
