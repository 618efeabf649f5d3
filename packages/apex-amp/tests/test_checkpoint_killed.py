"""A run killed at random points, also while it saves, ends with the bits of one that was not."""

import contextlib
import importlib.util
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

TRAINER = Path(__file__).with_name("checkpoint_trainer.py")
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
STEPS = 10  # of the trainer
ATTEMPTS = 3  # the first dies while it saves, the next at some time, the last goes through
TORCH_KINDS = ["sgd", "adam"]
FUSED_KINDS = ["fused_sgd", "fused_adam", "fused_lamb"]
# The wheel is tested alone as well: there are no fused optimizers to test then.
KINDS = TORCH_KINDS + (FUSED_KINDS if importlib.util.find_spec("apex.optimizers") else [])
SAMPLE = {
    *(("O0", "fused_sgd"), ("O0", "adam"), ("O1", "adam"), ("O1", "fused_lamb"), ("O2", "sgd")),
    *(("O2", "adam"), ("O2", "fused_sgd"), ("O3", "sgd"), ("O4", "adam"), ("O5", "sgd")),
    ("O5", "fused_adam"),
}
SAMPLE_OF_TWO = {
    *(
        ("O1", "adam"),
        ("O2", "sgd"),
        ("O2", "fused_adam"),
        ("O3", "fused_sgd"),
        ("O5", "fused_lamb"),
    ),
}


def grid(sample):
    """All levels with all optimizers; those outside of the sample are slow tests."""
    return [
        pytest.param(*pair, marks=[] if pair in sample else pytest.mark.slow, id="-".join(pair))
        for pair in itertools.product(LEVELS, KINDS)
    ]


class Trainer:
    """The process that forks those of each job."""

    def __init__(self):
        self._server = subprocess.Popen(
            [sys.executable, str(TRAINER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert self._server.stdout.readline() == "ready\n"

    def run(self, job, kill_after_s=None):
        """Start the job's processes, kill them after a while, and return their exit codes."""
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        pids = json.loads(self._server.stdout.readline())
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            for pid in pids:  # not yet waited for by the server, or gone
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return json.loads(self._server.stdout.readline())

    def stop(self):
        self._server.stdin.close()
        self._server.wait(10)
        self._server.stdout.close()


@pytest.fixture(scope="module")
def trainer():
    trainer = Trainer()
    yield trainer
    trainer.stop()


def same(actual, expected):
    """Equal structure, types, and bits of tensors."""
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert actual.keys() >= expected.keys()  # torch adds options to groups that it loads
        return all(same(actual[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        return all(map(same, actual, expected))
    if isinstance(expected, torch.Tensor):
        return actual.dtype is expected.dtype and torch.equal(actual, expected)
    return actual == expected


def check_kills(trainer, folder, level, kind, ranks):
    """Kill one run in the middle of a save and at random times, and compare it with another."""
    random_ = random.Random(f"{level} {kind} {ranks}")
    job = {"level": level, "kind": kind, "ranks": ranks, "attempt": 0}
    straight, killed = folder / "straight", folder / "killed"
    straight.mkdir()
    killed.mkdir()
    start = time.monotonic()
    codes = trainer.run(job | {"folder": str(straight)})
    duration_s = time.monotonic() - start
    assert codes == [0] * ranks, (straight / "error.txt").read_text()

    deaths = 0
    size = (straight / "checkpoint.pt").stat().st_size
    for attempt in range(1, ATTEMPTS + 1):
        options = job | {"folder": str(killed), "attempt": attempt}
        if attempt == 1:
            death = {
                "dies_in_save": random_.randint(1, STEPS),
                "dies_at_byte": random_.randrange(size),
            }
            codes = trainer.run(options | death)
            assert codes[0] == -signal.SIGKILL, codes
            assert list(killed.glob("*.tmp"))
        elif attempt < ATTEMPTS:
            codes = trainer.run(options, kill_after_s=random_.uniform(0, duration_s))
        else:
            codes = trainer.run(options)
        deaths += -signal.SIGKILL in codes
        if codes[0] not in (0, -signal.SIGKILL):
            raise AssertionError((killed / "error.txt").read_text())
    assert codes == [0] * ranks, (killed / "error.txt").read_text()
    assert deaths > 0
    states = [torch.load(f / "checkpoint.pt", weights_only=True) for f in (killed, straight)]
    assert states[0]["step"] == STEPS
    assert same(*states)


@pytest.mark.parametrize(("level", "kind"), grid(SAMPLE))
def test_killed_run_ends_with_the_same_bits(level, kind, trainer, tmp_path):
    check_kills(trainer, tmp_path, level, kind, ranks=1)


@pytest.mark.parametrize(("level", "kind"), grid(SAMPLE_OF_TWO))
def test_two_killed_processes_end_with_the_same_bits(level, kind, trainer, tmp_path):
    check_kills(trainer, tmp_path, level, kind, ranks=2)
