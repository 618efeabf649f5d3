"""Processes that build the same op at once, are killed, or are interrupted.

`APEX_KILLS` gives the number of random moments at which a building process is killed; by hand: 50.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parent.parent
KILLS = int(os.environ.get("APEX_KILLS", "4"))
TIMEOUT_S = 120

# Imports no torch, which would take longer than all the rest.
PROGRAM = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from shared_csrc.native import build, jit, targets

op = build.Op("my_op", Path(sys.argv[2]))
print("ready", flush=True)
library = jit.build_op(op, targets.Target("cpu", "baseline"), package="apex.test")
print(library.read_text(), end="")
"""

COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo fake; exit; }
while [ $# -gt 0 ]; do
  [ "$1" = -o ] && out=$2
  [ "$1" = -MF ] && echo "$out:" > "$2"
  shift
done
echo "$out" >> "$RECORD"
printf 'half a ' > "$out"
sleep 0.2
printf 'library' >> "$out"
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "my_op").mkdir()
    (tmp_path / "my_op" / "my_op.cpp").write_text("// kernels\n")
    (tmp_path / "cxx").write_text(COMPILER)
    (tmp_path / "cxx").chmod(0o755)
    return tmp_path


def start(place):
    environment = os.environ | {
        "APEX_JIT": "1",
        "APEX_CACHE_DIR": str(place / "cache"),
        "CXX": str(place / "cxx"),
        "RECORD": str(place / "record"),
    }
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(SHARED.parent), str(place / "my_op")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell starts in the background ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process):
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    assert out.endswith("half a library"), out
    return err


def kinds_in(cache):
    """Return what lies in a cache, "folder" for the op's own."""
    return {
        path.suffix or ("left" if path.name[0] == "." else "folder") for path in cache.iterdir()
    }


def test_eight_processes_build_once(place):
    said = [finish(process) for process in [start(place) for _ in range(8)]]
    assert sum("compiling my_op" in text for text in said) == 1
    assert len((place / "record").read_text().split()) == 2  # an object and a library
    assert kinds_in(place / "cache") == {"folder", ".lock"}


def test_another_builds_when_the_first_is_killed(place):
    chance = random.Random(0)
    for _ in range(KILLS):
        killed = start(place)
        assert killed.stdout.readline() == "ready\n"
        waiting = start(place)
        time.sleep(chance.uniform(0, 0.8))
        killed.kill()
        finish(waiting)
        killed.communicate()
        finish(start(place))
        (folder,) = (place / "cache").glob("apex_test-*[!k]")
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    time.sleep(0.5)  # compilers of killed processes end
    assert kinds_in(place / "cache") <= {".lock", ".log"}


def test_ctrl_c_leaves_nothing_and_ends_the_compiler(place):
    (place / "cxx").write_text(COMPILER.replace("sleep 0.2", "sleep 60"))
    process = start(place)
    deadline = time.monotonic() + TIMEOUT_S
    while not (place / "record").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)  # also once the compiler's end of the pipe is closed
    assert "KeyboardInterrupt" in err
    assert kinds_in(place / "cache") <= {".lock"}
    (place / "cxx").write_text(COMPILER)
    finish(start(place))  # at once: no lock has stayed behind
