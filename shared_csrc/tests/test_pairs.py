"""Rounding to bfloat16 in pairs (engine/pairs_cpu.h), by every way that a processor offers."""

import subprocess

import pytest


@pytest.mark.builds
def test_rounds_as_one_by_one(cpu_level, compile_cpp):
    program = compile_cpp("pairs.cpp", cpu_level)
    result = subprocess.run(
        [str(program)], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.stdout == "0 failures\n", result.stdout
