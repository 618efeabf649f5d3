"""What each session of nox took, and what it left out: the table that ends .ci/run.

python ci/stages.py FILE

Where ``APEX_CI_STAGES`` names a file, each session adds a line to it: `timed` measures the wall
time and the CPU time of the processes that it started, `note` says by which rule it took a sample.
"""

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

VARIABLE = "APEX_CI_STAGES"
_notes: list[str] = []


def timed(function: Callable) -> Callable:
    """Wrap a session's function so that its times are recorded, also where it fails."""

    @functools.wraps(function)
    def session(session, *arguments, **options):
        _notes.clear()
        start, cpu = time.monotonic(), cpu_seconds()
        ended = "failed"
        try:
            function(session, *arguments, **options)
            ended = "passed"
        finally:
            took = {"wall": time.monotonic() - start, "cpu": cpu_seconds() - cpu}
            record(session.name, took | {"ended": ended, "notes": list(_notes)})

    return session


def note(text: str) -> None:
    """Say what the running session leaves out, and by which rule."""
    _notes.append(text)


def cpu_seconds() -> float:
    """Return the CPU time of all processes that this one started and waited for."""
    times = os.times()
    return times.children_user + times.children_system


def record(name: str, facts: dict) -> None:
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a") as file:  # a line at once: two processes write
            file.write(json.dumps({"name": name} | facts) + "\n")


def table(stages: list[dict]) -> str:
    """Return the stages in the order in which they ended, with sums, as lines of text."""
    width = max(len(stage["name"]) for stage in stages)
    total = {"wall": sum(s["wall"] for s in stages), "cpu": sum(s["cpu"] for s in stages)}
    lines = [f"{'stage':{width}}    wall s   CPU s  ended   sample"]
    for stage in [*stages, {"name": "sum", "ended": "", "notes": []} | total]:
        times = f"{stage['wall']:9.0f}{stage['cpu']:8.0f}  {stage['ended']:7}"
        lines.append(f"{stage['name']:{width}} {times} {'; '.join(stage['notes'])}".rstrip())
    return "\n".join(lines)


def main(path: str) -> None:
    stages = [json.loads(line) for line in Path(path).read_text().splitlines()]
    print(table(stages) if stages else "no stage was recorded")


if __name__ == "__main__":
    main(*sys.argv[1:])
