"""multiproc: one process per rank, their output, and failures that are not lost."""

import os
import subprocess
import sys
import time

import pytest

from apex.parallel import multiproc


def launch(tmp_path, text, *arguments):
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, "-m", "apex.parallel.multiproc", str(script), *arguments]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_ranks_and_logs(tmp_path):
    done = launch(tmp_path, "import sys; print(sys.argv[1:])", "--world-size", "2", "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['--world-size', '2', '--lr', '1', '--rank', '0']\n"
    second = (tmp_path / "GPU_1.log").read_text()
    assert second == "['--world-size', '2', '--lr', '1', '--rank', '1']\n"


@pytest.mark.slow
def test_a_failing_rank_ends_the_others(tmp_path):
    text = "import sys, time\nif sys.argv[-1] == '1': sys.exit(3)\ntime.sleep(100)"
    start = time.monotonic()
    assert launch(tmp_path, text, "--world-size", "2").returncode == 3
    assert time.monotonic() - start < 60


def test_options_are_replaced():
    arguments = ["s.py", "--rank", "7", "-v"]
    assert multiproc.with_option(arguments, "--rank", 1) == ["s.py", "--rank", "1", "-v"]
    assert multiproc.with_option(["s.py"], "--rank", 1) == ["s.py", "--rank", "1"]


@pytest.mark.parametrize("value", [[], ["0"], ["many"]])
def test_bad_world_size(value):
    with pytest.raises(ValueError, match="needs an integer >= 1"):
        multiproc.world_size_of(["s.py", "--world-size", *value])


@pytest.mark.slow
def test_without_gpu_or_script(tmp_path):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    for arguments, text in ((["s.py"], "no GPU found"), ([], "usage:")):
        command = [sys.executable, "-m", "apex.parallel.multiproc", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2
        assert text in done.stderr
