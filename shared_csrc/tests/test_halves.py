"""float16 by integer arithmetic (core/types.h): every code, and every kind of rounding."""

import shutil
import subprocess

import pytest

STEP = 2003  # 2 million of the 2^32 floats; all of them, once: 0 failures


def assert_right(program):
    result = subprocess.run(
        [str(program), str(STEP)], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.stdout == "0 failures\n", result.stdout


@pytest.mark.builds
def test_conversions_of_half(cpu_level, compile_cpp):
    assert_right(compile_cpp("halves.cpp", cpu_level))


@pytest.mark.builds
@pytest.mark.parametrize("cxx", ["g++-11", "clang++-14"])
def test_compilers_without_float16(cxx, compile_cpp, monkeypatch):
    """`nox -s kernels` compiles every op with them."""
    if shutil.which(cxx) is None:
        pytest.skip(f"{cxx} is not installed")
    monkeypatch.setenv("CXX", cxx)
    assert_right(compile_cpp("halves.cpp", "baseline"))
