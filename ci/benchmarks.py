"""Run benchmarks, each in fresh processes, and write figures, tables and plots to docs/benchmarks.

python ci/benchmarks.py [NAME...]   NAME: a package, or part of a benchmark's name; default: all
"""

import json
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
    partial = RESULTS / f".{name}.partial.jsonl"
    partial.unlink(missing_ok=True)
    cores = len(os.sched_getaffinity(0))
    for threads, malloc in ((cores, TUNED_MALLOC), (1, TUNED_MALLOC), (cores, {})):
        kind = "tuned" if malloc else "stock"
        print(f"\n{name}: {threads} threads, {kind} malloc", flush=True)
        settings = {"OMP_NUM_THREADS": str(threads), "APEX_BENCH_JSON": str(partial), **malloc}
        settings["APEX_BENCH_DEVICE"] = "cpu"  # of a GPU: ci/gpu.py
        run([sys.executable, str(file)], settings)
    results = RESULTS / f"{name}.jsonl"
    partial.replace(results)
    write_report(name, results, cores)


def write_report(name: str, results: Path, cores: int) -> None:
    """Write the table, and the plot of the setting that compares kernels alone."""
    bench = [sys.executable, "-m", "apex_testkit.bench"]
    picture = results.with_suffix(".png")
    main_setting = results.with_suffix(".main.jsonl")
    with main_setting.open("w") as file:
        for line in results.read_text().splitlines():
            record = json.loads(line)
            if record["threads"] == cores and record["malloc"] == "tuned":
                file.write(line + "\n")
    run([*bench, "plot", str(main_setting), str(picture)], {})
    main_setting.unlink()
    table = run([*bench, "table", str(results)], {}, capture=True)
    report = f"# {name}\n\n`nox -s bench -- {name}` repeats it.\n\n![]({picture.name})\n\n"
    results.with_suffix(".md").write_text(f"{report}```\n{table}```\n")


def run(command: list[str], settings: dict[str, str], *, capture: bool = False) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "ci" / "testkit")} | settings
    done = subprocess.run(command, env=environment, text=True, check=False, capture_output=capture)
    if done.returncode:
        sys.exit(f"benchmarks: {' '.join(command)} failed with exit status {done.returncode}")
    return done.stdout or ""


if __name__ == "__main__":
    main(sys.argv[1:])
