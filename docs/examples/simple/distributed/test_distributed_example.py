"""Runs the example with one and with two processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("distributed_data_parallel.py")


def run(processes, *arguments, launcher="run"):
    launcher = ["-m", f"torch.distributed.{launcher}", f"--nproc_per_node={processes}"]
    launcher += ["--master_port=0", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    done = subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"rank (\d): final loss (\S+), sum of weights (\S+)", done.stdout)


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_two_processes_agree(level):
    first, second = sorted(run(2, "--opt-level", level, "--steps", "60"))
    assert (first[0], second[0]) == ("0", "1")
    assert first[2] == second[2]
    assert 0 < float(first[1]) < 0.9


def test_launcher_of_older_scripts():
    """It gives every process --local-rank."""
    ranks = [rank for rank, *_ in run(2, "--steps", "2", launcher="launch")]
    assert sorted(ranks) == ["0", "1"]


def test_one_process():
    ((_, loss, _),) = run(1, "--steps", "60")
    assert 0 < float(loss) < 0.9
