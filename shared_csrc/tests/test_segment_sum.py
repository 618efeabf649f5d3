"""segment_sum against plain loops: per ISA level, under sanitizers, and on the emulated GPU."""

import os
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("segment_sum.cpp")
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"]


def assert_no_failures(program, **environment):
    result = subprocess.run(
        [str(program)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout == "0 failures\n"


@pytest.mark.builds
@pytest.mark.parametrize("flags", [[], SANITIZERS], ids=["optimized", "sanitized"])
def test_agrees_with_plain_loops(flags, cpu_level, compile_cpp):
    assert_no_failures(compile_cpp(SOURCE.name, cpu_level, *flags))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory, compile_emulated):
    return compile_emulated(tmp_path_factory.mktemp("emulated"), SOURCE)


@pytest.mark.builds
@pytest.mark.parametrize("width", ["32", "64"])
def test_agrees_on_an_emulated_gpu(width, emulated):
    """In two orders of threads, which must give the same bits."""
    assert_no_failures(emulated, APEX_EMULATE=width, APEX_EMULATE_ORDERS="2")
