"""With torch for CUDA, kernels for its GPUs are compiled by what torch brings, and nothing else."""

import os
import re
import subprocess
import sys

import pytest
import torch

# The oldest card that every NVRTC of a supported torch compiles for.
CARD = "sm_75"


@pytest.fixture
def doctor(tmp_path):
    """Return a function that runs `python -m apex.amp` where there are no programs."""
    if torch.version.cuda is None:
        pytest.skip("this torch is not built for CUDA")
    environ = {"APEX_CACHE_DIR": str(tmp_path / "cache"), "APEX_JIT": "1", "PATH": str(tmp_path)}

    def run(*options):
        command = [sys.executable, "-m", "apex.amp", *options]
        done = subprocess.run(
            command, env=os.environ | environ, capture_output=True, text=True, timeout=300
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_neither_compilers_nor_a_gpu_are_needed(doctor, tmp_path):
    status, said = doctor("--compile", CARD)
    assert status == 0, said
    count, total = map(int, re.findall(rf"{CARD}: (\d+) of (\d+) kernels", said)[-1])
    kept = sorted(tmp_path.rglob("*.kernel"))
    assert len(kept) == count == total > 20
    assert all(b"\x7fELF" in file.read_bytes() for file in kept)
    before = {file: file.stat().st_mtime_ns for file in kept}
    status, said = doctor("--compile", CARD)
    assert status == 0
    assert "compiling" not in said  # all is there
    assert before == {file: file.stat().st_mtime_ns for file in sorted(tmp_path.rglob("*.kernel"))}


def test_cards_that_it_does_not_know_are_named(doctor, tmp_path):
    status, said = doctor("--compile", CARD, "sm_12")
    assert status == 1
    assert re.search(r"expected some of .*sm_90.*, which NVRTC [\d.]+ knows, got sm_12", said)
    assert not list(tmp_path.rglob("*.kernel"))
