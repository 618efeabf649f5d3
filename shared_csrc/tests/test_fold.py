"""Row::fold, Row::max, Row::at and rows with gaps, per ISA level and under sanitizers."""

import subprocess

import pytest

SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"]


@pytest.mark.builds
@pytest.mark.parametrize("flags", [[], SANITIZERS], ids=["optimized", "sanitized"])
def test_agrees_with_plain_loops(flags, cpu_level, compile_cpp):
    program = compile_cpp("fold.cpp", cpu_level, *flags)
    result = subprocess.run(
        [str(program)], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout == "0 failures\n"
