"""Benchmarks one after the other in one process, which imports torch and its compiler once.

python ci/gpu_benchmarks.py OUTCOMES SECONDS TURN/TURNS:FILE...

Each file has its share of the seconds that are left for its turn, which measures some of its cases
(apex_testkit/bench_turns.py); what it has recorded by then counts. How each ended is a line of
JSON in the file OUTCOMES.
"""

import importlib
import json
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path


class OutOfTime(BaseException):
    """Not an Exception, so that no benchmark takes it for an error of its own."""


def main(outcomes: str, seconds: str, *runs: str) -> None:
    deadline = time.monotonic() + float(seconds)
    # Before any time limit: an import that is cut off leaves half a module to all that follow.
    for name in ("torch", "torch._dynamo.convert_frame", "torch._inductor.compile_fx"):
        importlib.import_module(name)
    turns = importlib.import_module("apex_testkit.bench_turns")

    def stop(*_):
        raise OutOfTime

    signal.signal(signal.SIGALRM, stop)
    for index, run in enumerate(runs):
        turn, _, file = run.partition(":")
        turns.begin(*map(int, turn.split("/")))
        share = max(0.1, (deadline - time.monotonic()) / (len(runs) - index))
        start = time.monotonic()
        status, detail = ended(lambda file=file: runpy.run_path(file, run_name="__main__"), share)
        outcome = {"run": run, "status": status, "seconds": time.monotonic() - start}
        with Path(outcomes).open("a") as lines:
            lines.write(json.dumps(outcome | {"detail": detail}) + "\n")
    turns.begin(0, 1)


def ended(run: Callable[[], object], seconds: float) -> tuple[str, str]:
    """Run within a time limit; return "passed", "failed" or "timed out", and the error."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        run()
    except OutOfTime:
        return "timed out", ""
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "passed", ""


if __name__ == "__main__":
    main(*sys.argv[1:])
