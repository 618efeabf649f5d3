"""Philox of math/philox.h: known answers, and the same numbers from vectors as one by one."""

import shutil
import subprocess

import pytest


def assert_right(program):
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == "0 failures\n", result.stdout


@pytest.mark.builds
def test_known_answers(cpu_level, compile_cpp):
    assert_right(compile_cpp("philox.cpp", cpu_level))


@pytest.mark.builds
@pytest.mark.parametrize("cxx", ["g++-11", "clang++-14"])
def test_other_compilers(cxx, cpu_level, compile_cpp, monkeypatch):
    if shutil.which(cxx) is None:
        pytest.skip(f"{cxx} is not installed")
    monkeypatch.setenv("CXX", cxx)
    assert_right(compile_cpp("philox.cpp", cpu_level))
