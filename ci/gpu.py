"""Everything that a machine with a GPU can tell, in one command that needs no network.

python ci/gpu.py [--wheels DIR] [--out DIR] [--only tests,sanitizer,bench] [--minutes N]

Runs the GPU tests of all packages, compute-sanitizer on every op, and the benchmarks, each within
its share of the time; a step that fails does not stop the next. Figures go to DIR (docs/benchmarks)
as JSON and as a Markdown table. Exit status: 0 if all passed, 1 if anything failed.

Without --wheels the packages are built from this checkout for the card at hand, which takes nvcc or
hipcc and ninja. `nox -s gpu_wheels` makes a folder of wheels, test tools included, to carry to a
machine that lacks these. Nothing is installed into the environment that runs this.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ci" / "testkit")]

from ci import gpu_install, gpu_report  # noqa: E402
from ci.gpu_process import Outcome, execute, find_sanitizer  # noqa: E402

STEPS = ("tests", "sanitizer", "bench")
# Of the time that is left when a step begins; the last takes what the others left.
SHARES = {"tests": 0.45, "sanitizer": 0.35, "bench": 1.0}
PACKAGES = sorted(p.parent.name for p in ROOT.glob("packages/*/pyproject.toml"))
SANITIZED_CASES = 2  # of each test function: every op runs, in seconds instead of minutes
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


@dataclass
class Run:
    """What one call of this command was asked for and has seen so far."""

    device: str
    out: Path
    deadline: float
    environment: dict[str, str]
    results: list[Outcome] = field(default_factory=list)

    def share(self, step: str) -> float:
        """Seconds for a step that begins now."""
        return max(1.0, (self.deadline - time.monotonic()) * SHARES[step])

    def call(self, name: str, command: list[str], seconds: float, **settings: str) -> Outcome:
        """Run a command and keep what came of it; its output goes to a file of its name."""
        log = self.out / "logs" / f"{name.replace(' ', '-').replace('/', '-')}.log"
        outcome = execute(name, command, self.environment | settings, seconds, log, cwd=ROOT)
        self.results.append(outcome)
        print(outcome.line(), flush=True)
        return outcome


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="apex-gpu-") as scratch:
        run = Run(options.device, options.out, started + 60 * options.minutes, {})
        try:
            run.environment = gpu_install.environment(Path(scratch), options.wheels, options.device)
        except gpu_install.InstallError as error:
            print(f"gpu: {error}", file=sys.stderr)
            return 1
        run.results.append(Outcome("install", "passed", time.monotonic() - started))
        for step in options.only:
            guarded(step, run)
        records = gpu_report.write(run.device, run.out, [asdict(r) for r in run.results])
    print(gpu_report.summary(run.results, len(records), time.monotonic() - started))
    return 1 if any(r.status in ("failed", "timed out") for r in run.results) else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    usage, _, text = __doc__.partition("\n\n")[2].partition("\n\n")
    parser = argparse.ArgumentParser(usage=usage.removeprefix("python "), description=text)
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="folder of wheels; default: build here"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--only", type=step_list, default=list(STEPS), help=", ".join(STEPS))
    parser.add_argument(
        "--minutes", type=float, metavar="N", default=10.0, help="for all steps together"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal without a GPU"
    )
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes must be positive, got {options.minutes}")
    if options.wheels and not list(options.wheels.glob("apex_*.whl")):
        parser.error(f"--wheels: {options.wheels} holds no wheel of Apex")
    options.out = options.out.resolve()
    return options


def step_list(text: str) -> list[str]:
    wanted = [part.strip() for part in text.split(",")]
    unknown = [part for part in wanted if part not in STEPS]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(STEPS)}, got {unknown[0]!r}")
    return [step for step in STEPS if step in wanted]


def guarded(step: str, run: Run) -> None:
    """Run a step; an error of its own is a failure of that step alone."""
    steps: dict[str, Callable[[Run], None]] = {"tests": test, "sanitizer": sanitize, "bench": bench}
    print(f"\n{step}, up to {run.share(step):.0f} s", flush=True)
    try:
        steps[step](run)
    except Exception as error:  # the next step is to run whatever this one met
        run.results.append(Outcome(step, "failed", 0.0, f"{type(error).__name__}: {error}"))
        print(run.results[-1].line(), file=sys.stderr)


def test(run: Run) -> None:
    """All device tests of all packages, at once: most of their time is compilers and Python."""
    seconds = run.share("tests")
    limits = ["--device", run.device, "--device-tests-only", "-m", "not builds", "--timeout", "120"]
    workers = max(1, min(len(PACKAGES), (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(workers) as pool:
        calls = [
            pool.submit(
                run.call,
                f"tests {package}",
                [*PYTEST, *limits, "-rs", f"packages/{package}/tests"],
                # Those that wait for a worker share its time.
                seconds * workers / len(PACKAGES),
            )
            for package in PACKAGES
        ]
    for call in calls:
        call.result()


def sanitize(run: Run) -> None:
    """compute-sanitizer on a few cases of every op: memcheck, then racecheck."""
    if run.device == "cpu" or gpu_install.is_rocm():
        reason = "compute-sanitizer is NVIDIA's and needs a CUDA GPU"
        run.results.append(Outcome("sanitizer", "skipped", 0.0, reason))
        print(run.results[-1].line())
        return
    sanitizer = find_sanitizer()
    files = sorted(str(f.relative_to(ROOT)) for f in ROOT.glob("packages/*/tests/test_*_gpu.py"))
    sample = ["-p", "ci.sampling", "--cases-per-test", str(SANITIZED_CASES)]
    limits = ["--device", run.device, "-k", "test_is_repeatable", *sample]
    deadline = time.monotonic() + run.share("sanitizer")
    jobs = [(tool, file) for tool in ("memcheck", "racecheck") for file in files]
    for index, (tool, file) in enumerate(jobs):
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
        # Of torch's kernels nothing is asked, and all of them together take minutes.
        command += ["--kernel-name", "kernel_substring=apex", *PYTEST, *limits, file]
        seconds = max(1.0, (deadline - time.monotonic()) / (len(jobs) - index))
        # Tensors that share a block of torch's cache would hide a step from one into the next.
        package = file.split("/")[1]
        run.call(f"{tool} {package}", command, seconds, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def bench(run: Run) -> None:
    """All benchmarks, one after the other, each within its share of what is left."""
    settings = {
        "APEX_BENCH_DEVICE": run.device,
        "APEX_BENCH_JSON": str(gpu_report.records_file(run.out)),
        "APEX_BENCH_SECONDS": "0.3",  # a case; GPUs are quiet, and there are many cases
    }
    gpu_report.records_file(run.out).unlink(missing_ok=True)
    files = sorted(ROOT.glob("packages/*/benchmarks/bench_*.py"))
    files = [f for f in files if "device" in f.read_text()]  # one is of processes, on CPUs
    deadline = time.monotonic() + run.share("bench")
    for index, file in enumerate(files):
        seconds = max(1.0, (deadline - time.monotonic()) / (len(files) - index))
        name = file.stem.removeprefix("bench_")
        run.call(f"bench {name}", [sys.executable, str(file)], seconds, **settings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
