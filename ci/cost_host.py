"""How many instructions the host spends in a public call: by hand, where valgrind runs.

python ci/cost_host.py [OP...]

Callgrind counts the smallest case of each op on the CPU, once it has been called before: Python,
torch's dispatcher, our drivers, and a kernel for a handful of numbers. Numbers differ by a percent
from run to run (hashes, addresses), so that they are printed, and no table keeps them.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "shared_csrc")]

# Callgrind counts while it runs, and dumps when it returns: how ctypes calls a function.
MARK = "ffi_call"
TOTAL = re.compile(r"^summary: (\d+)", re.MULTILINE)
# Valgrind knows no AVX-512, and counts one thread after the other.
ENVIRONMENT = {"APEX_CPU_LEVEL": "baseline", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def counted(function) -> None:
    """Call a function inside the marked one."""
    ctypes.CFUNCTYPE(None)(function)()


def call(op: str) -> None:
    """What runs under callgrind: the parts of the op's smallest cases, a dump after each."""
    import torch

    from ci.cost_counts import WARM_CALLS, parts_of
    from ci.cost_steps import CASES

    torch.set_num_threads(1)
    for case in CASES[op]():
        for part, function in parts_of(case) if case.is_smallest else ():
            for _ in range(WARM_CALLS):
                function()
            counted(lambda run=function: run() and None)
            print(f"{op}: {case.name}: {part}", flush=True)


def measure(op: str) -> list[str]:
    """Return a line for each part of the op's smallest cases, with its instructions."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "out")
        command = ["valgrind", "--tool=callgrind", f"--toggle-collect={MARK}"]
        command += [f"--dump-after={MARK}", f"--callgrind-out-file={output}"]
        command += [sys.executable, __file__, "--call", op]
        environment = os.environ | ENVIRONMENT
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"cost_host: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
        names = [line for line in done.stdout.splitlines() if line.startswith(f"{op}: ")]
        dumps = sorted(Path(folder).glob("out.*"), key=lambda file: int(file.suffix[1:]))
        totals = [int(TOTAL.search(dump.read_text())[1]) for dump in dumps]
    # Imports call by ctypes too, before the first case.
    return [f"{n}: {total:,}" for n, total in zip(names, totals[-len(names) :], strict=True)]


def main(*words: str) -> None:
    from ci.workspace import ops

    if words[:1] == ("--call",):
        call(words[1])
        return
    if shutil.which("valgrind") is None:
        sys.exit(
            "cost_host: valgrind was not found. On Debian and Ubuntu: apt-get install valgrind"
        )
    for op in words or sorted(ops()):
        print("\n".join(measure(op)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
