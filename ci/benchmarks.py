"""Run benchmarks, each in fresh processes, and write their figures to docs/benchmarks.

`nox -s docs` makes a table and a plot of them.

python ci/benchmarks.py [NAME...]   NAME: a package, or part of a benchmark's name; default: all
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks"

# Fresh outputs above 32 MiB are mapped and unmapped by glibc at every call, and those page faults
# would hide the kernels. Set high for all contestants; the stock setting is measured beside it.
GIB = str(1 << 30)
TUNED_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": GIB,
    "MALLOC_TRIM_THRESHOLD_": GIB,
    "MALLOC_TOP_PAD_": str(1 << 28),
}

# Of several processes, with one thread each whatever OMP_NUM_THREADS says.
SETS_ITS_OWN_THREADS = {"ddp", "ddp_network", "distributed_adam"}


# Of minutes; with all cores, whatever else runs on one of them decides.
WITH_ONE_THREAD = {"training"}


def main(wanted: list[str]) -> None:
    found = sorted(ROOT.glob("packages/*/benchmarks/bench_*.py"))
    chosen = [f for f in found if not wanted or any(is_called(f, name) for name in wanted)]
    if not chosen:
        names = ", ".join(f.stem.removeprefix("bench_") for f in found)
        sys.exit(f"benchmarks: none is called {' or '.join(wanted) or 'anything'}; found: {names}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for file in chosen:
        measure(file)


def is_called(file: Path, name: str) -> bool:
    """Whether a benchmark belongs to the package ``name``, or has it in its own name."""
    return name == file.parts[-3] or name in file.stem


def measure(file: Path) -> None:
    """Run one benchmark at every setting; replace its results when all have run."""
    name = file.stem.removeprefix("bench_")
    partial = RESULTS / f".{name}.partial.csv"
    partial.unlink(missing_ok=True)
    cores = len(os.sched_getaffinity(0))
    settings = [(cores, TUNED_MALLOC), (1, TUNED_MALLOC), (cores, {})]
    if name in SETS_ITS_OWN_THREADS:
        settings = [(1, TUNED_MALLOC), (1, {})]
    if name in WITH_ONE_THREAD:
        settings = [(1, TUNED_MALLOC)]
    for threads, malloc in settings:
        kind = "tuned" if malloc else "stock"
        print(f"\n{name}: {threads} threads, {kind} malloc", flush=True)
        variables = {"OMP_NUM_THREADS": str(threads), "APEX_BENCH_RECORDS": str(partial), **malloc}
        variables["APEX_BENCH_DEVICE"] = "cpu"  # of a GPU: ci/gpu.py
        run([sys.executable, str(file)], variables)
    partial.replace(RESULTS / f"{name}.csv")


def run(command: list[str], variables: dict[str, str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "ci" / "testkit")} | variables
    done = subprocess.run(command, env=environment, check=False)
    if done.returncode:
        sys.exit(f"benchmarks: {' '.join(command)} failed with exit status {done.returncode}")


if __name__ == "__main__":
    main(sys.argv[1:])
