"""One command of ci/gpu.py: run within a time limit, logged, and told in a line."""

import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 15


@dataclass(frozen=True)
class Outcome:
    """What came of a command: passed, failed, timed out or skipped."""

    name: str
    status: str
    seconds: float
    detail: str = ""  # the last line of a command that passed; the end of one that failed

    def line(self) -> str:
        return f"{self.status:<10} {self.name:<32} {self.seconds:6.0f} s  {self.detail}".rstrip()


def execute(
    name: str,
    command: list[str],
    environment: dict[str, str],
    seconds: float,
    log: Path,
    cwd: Path,
) -> Outcome:
    """Run a command, end it and its children after ``seconds``, and keep its output in ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("w") as file:
        # A process group of its own, so that children of a command that hangs end with it.
        process = subprocess.Popen(
            command, cwd=cwd, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        except BaseException:
            _end(process)
            raise
        if code is None:
            _end(process)
    took = time.monotonic() - start
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if code == 0:
        return Outcome(name, "passed", took, lines[-1].strip() if lines else "")
    status = "timed out" if code is None else "failed"
    return Outcome(name, status, took, "\n    ".join(["", *lines[-TAIL_LINES:], f"(all: {log})"]))


def _end(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def find_sanitizer() -> str:
    """Path of compute-sanitizer: from PATH or the toolkit's folder."""
    homes = [os.environ.get(v, "") for v in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    path = os.pathsep.join([os.environ.get("PATH", ""), *(f"{h}/bin" for h in homes if h)])
    found = shutil.which("compute-sanitizer", path=path)
    if found is None:
        raise FileNotFoundError(
            "compute-sanitizer was not found; it is part of the CUDA toolkit. Put it on PATH, or "
            "leave this step out: --only tests,bench"
        )
    return found
