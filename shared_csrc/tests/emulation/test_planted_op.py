"""Faults of an op that is called through torch: operands by name, new tensors, workspaces."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent

BUGS = {
    "out of bounds: read of 4 bytes 0 bytes behind the end of `x` (100 elements of 4 bytes)": 1,
    "output that no kernel wrote: operand `y`, element 99 of 100": 2,
    "use after free: read of 4 bytes of `temporary`, which was released": 3,
    "read of memory that nothing was written to: operand `workspace`, element 0 of 400": 4,
    "access to memory that belongs to no operand: read of 4 bytes": 5,
    "a launch that GPUs refuse: the stream is not the current one of the op's context": 6,
}

SCRIPT = """
import torch
from shared_csrc.tests.emulation.planted_op.operators import planted_copy
x = torch.randn(100)
for _ in range(2):  # a fault leaves nothing behind
    assert torch.equal(planted_copy(x, 0), x)
    for bug in range(1, {count} + 1):
        try:
            planted_copy(x, bug)
        except RuntimeError as error:
            print("BUG", bug, error)
"""


@pytest.mark.builds
@pytest.mark.parametrize("width", ["32", "64"])
def test_reports(width, tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "planted-op-cache"
    environment = {"APEX_EMULATE": width, "APEX_CACHE_DIR": str(cache), "APEX_JIT": "1"}
    environment["PYTHONPATH"] = str(SHARED.parent)
    script = SCRIPT.format(count=len(BUGS))
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    reports = result.stdout.split("BUG ")[1:]
    assert len(reports) == 2 * len(BUGS), result.stdout
    for report, (message, bug) in zip(reports, [*BUGS.items()] * 2, strict=True):
        assert report.startswith(f"{bug} emulated GPU: {message}"), report
        assert "kernel: planted::copy" in report, report


@pytest.mark.builds
def test_trace(tmp_path, tmp_path_factory):
    """A line for each launch: library and kernel, grid, block, numbers, how memory was used."""
    cache = tmp_path_factory.getbasetemp() / "planted-op-cache"
    trace = tmp_path / "trace"
    environment = {"APEX_EMULATE": "32", "APEX_CACHE_DIR": str(cache), "APEX_JIT": "1"}
    environment |= {"PYTHONPATH": str(SHARED.parent), "APEX_EMULATE_TRACE": str(trace)}
    command = [sys.executable, "-c", SCRIPT.format(count=0)]
    subprocess.run(command, env=os.environ | environment, check=True, timeout=300)
    lines = trace.read_text().splitlines()
    assert len(lines) == 2
    where, grid, block, numbers, used = lines[0].split("\t")
    library, offset = where.rsplit(" ", 1)
    assert library.endswith("emu.so")
    assert int(offset, 16) > 0
    assert [len(text.split()) for text in (grid, block, used)] == [3, 3, 3]
    assert numbers.split() == ["100"]
    assert used == "0 100 0"
