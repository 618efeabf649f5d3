"""Everything that a machine with a GPU can tell, in one command that needs no network.

python ci/gpu.py [--wheels DIR] [--out DIR] [--only first_calls,tests,...] [--benchmarks NAME,...]
                 [--minutes N] [--nvrtc]
python ci/gpu.py --campaign [ARCHIVE] [--out DIR] [--minutes N]

Runs the device tests of all packages, compute-sanitizer on a case of each, and the benchmarks, each
within its share of the time; a step that fails does not stop the next. Figures go to DIR
(docs/benchmarks) as csv and as a Markdown table. Exit status: 0 if all passed, 1 if anything
failed. The benchmark "training", of minutes, runs only if it is named.

Without --wheels the packages are built from this checkout for the card at hand, which takes nvcc or
hipcc and ninja. `nox -s gpu_wheels` makes a folder of wheels, test tools included, to carry to a
machine that lacks these. Nothing is installed into the environment that runs this.

With --nvrtc the kernels are those that NVRTC compiles at their first calls, whatever nvcc's the
wheels bring: wheels of `nox -s build` do. Its cache is `APEX_CACHE_DIR`.

With --campaign it lets NVRTC compile kernels in many variants that were prepared elsewhere (`nox -s
gpu_wheels -- --campaign`), measures them, and prints which won, by op, dtype and size.
"""

import argparse
import json
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

from ci import gpu_campaign, gpu_install, gpu_report  # noqa: E402
from ci.gpu_process import Outcome, execute, find_sanitizer  # noqa: E402

STEPS = ("first_calls", "tests", "sanitizer", "bench")
# Of the time that is left when a step begins; the last takes what the others left.
SHARES = {"first_calls": 0.1, "tests": 0.45, "sanitizer": 0.35, "bench": 1.0}
PACKAGES = sorted(p.parent.name for p in ROOT.glob("packages/*/pyproject.toml"))
TOOLS = ("memcheck", "racecheck")
MINUTES, CAMPAIGN_MINUTES = 10, 8
BY_NAME_ALONE = {"training"}  # of minutes; of all benchmarks each has seconds
TURNS = 3  # in which all benchmarks run, each with other cases
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
TOLD_AT_ONCE = ["-p", "ci.gpu_tests"]


@dataclass
class Run:
    """What one call of this command was asked for and has seen so far."""

    device: str
    out: Path
    deadline: float
    environment: dict[str, str]
    benchmarks: list[str]  # empty: all
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

    def call_all(self, commands: dict[str, list[str]], seconds: float, **settings: str) -> None:
        """Run commands side by side, by name, each within the same seconds."""
        with ThreadPoolExecutor(len(commands)) as pool:
            calls = [pool.submit(self.call, n, c, seconds, **settings) for n, c in commands.items()]
        for call in calls:
            call.result()


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    started = time.monotonic()
    deadline = started + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    if options.campaign:
        return gpu_campaign.run(options.campaign, options.device, options.out, deadline)
    with tempfile.TemporaryDirectory(prefix="apex-gpu-") as scratch:
        run = Run(options.device, options.out, deadline, {}, options.benchmarks)
        try:
            run.environment = gpu_install.environment(Path(scratch), options.wheels, options.device)
        except gpu_install.InstallError as error:
            print(f"gpu: {error}", file=sys.stderr)
            return 1
        if options.nvrtc:
            run.environment |= {"APEX_CUDA_COMPILER": "nvrtc", "APEX_JIT": "1"}
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
        "--benchmarks", type=benchmark_list, default=[], metavar="NAME,...", help="default: all"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help=f"for all steps together; default: {MINUTES}, for a campaign {CAMPAIGN_MINUTES}",
    )
    parser.add_argument(
        "--campaign",
        type=Path,
        metavar="ARCHIVE",
        nargs="?",
        const=ROOT / "dist" / "campaign.tar.xz",
        help="of variants; default: dist/campaign.tar.xz",
    )
    parser.add_argument("--nvrtc", action="store_true", help="take NVRTC's kernels, not nvcc's")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal without a GPU"
    )
    options = parser.parse_args(arguments)
    if options.minutes is None:
        options.minutes = CAMPAIGN_MINUTES if options.campaign else MINUTES
    if options.minutes <= 0:
        parser.error(f"--minutes must be positive, got {options.minutes}")
    if options.wheels and not list(options.wheels.glob("apex_*.whl")):
        parser.error(f"--wheels: {options.wheels} holds no wheel of Apex")
    if options.campaign and not options.campaign.is_file():
        parser.error(f"--campaign: there is no {options.campaign}; see ci/campaign.py")
    options.out = options.out.resolve()
    return options


def name_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def benchmark_list(text: str) -> list[str]:
    names = name_list(text)
    for name in names:
        if not list(ROOT.glob(f"packages/*/benchmarks/bench_{name}.py")):
            raise argparse.ArgumentTypeError(f"there is no bench_{name}.py")
    return names


def step_list(text: str) -> list[str]:
    wanted = name_list(text)
    unknown = [part for part in wanted if part not in STEPS]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(STEPS)}, got {unknown[0]!r}")
    return [step for step in STEPS if step in wanted]


def guarded(step: str, run: Run) -> None:
    """Run a step; an error of its own is a failure of that step alone."""
    steps: dict[str, Callable[[Run], None]] = {"first_calls": first_calls, "tests": test}
    steps |= {"sanitizer": sanitize, "bench": bench}
    print(f"\n{step}, up to {run.share(step):.0f} s", flush=True)
    try:
        steps[step](run)
    except Exception as error:  # the next step is to run whatever this one met
        run.results.append(Outcome(step, "failed", 0.0, f"{type(error).__name__}: {error}"))
        print(run.results[-1].line(), file=sys.stderr)


def first_calls(run: Run) -> None:
    """A first step with kernels that NVRTC compiles, with those that it kept, and with nvcc's."""
    command = [sys.executable, str(ROOT / "ci" / "gpu_first_calls.py")]
    with tempfile.TemporaryDirectory(prefix="apex-first-calls-") as cache:
        settings = {"APEX_BENCH_DEVICE": run.device, "APEX_CACHE_DIR": cache, "APEX_JIT": "1"}
        for name, compiler in (("empty", "nvrtc"), ("filled", "nvrtc"), ("not used", "nvcc")):
            own = settings | {"APEX_CUDA_COMPILER": compiler}
            if name == "not used":
                own["APEX_JIT"] = "0"
                if run.environment.get("APEX_CUDA_COMPILER") == "nvrtc":
                    continue  # nvcc's kernels need not be there
            title = f"first call, {compiler}, cache {name}"
            run.call(title, command, run.share("first_calls"), **own)


def test(run: Run) -> None:
    """All device tests of all packages, at once: most of their time is compilers and Python."""
    limits = ["--device", run.device, "--device-tests-only", "-m", "not builds"]
    # A thread's alarm ends a test that waits for a kernel; a signal's would come after it.
    limits += ["--timeout", "120", "--timeout-method", "thread", *TOLD_AT_ONCE, "-rs"]
    run.call_all(
        {
            f"tests {package}": [*PYTEST, *limits, "-n", str(share), f"packages/{package}/tests"]
            for package, share in processes().items()
        },
        run.share("tests"),
    )


def processes() -> dict[str, int]:
    """Share the cores of this machine among the packages, by the number of their test files."""
    files = {p: len(list(ROOT.glob(f"packages/{p}/tests/test_*.py"))) for p in PACKAGES}
    cores = os.cpu_count() or 1
    return {p: max(1, round(cores * count / sum(files.values()))) for p, count in files.items()}


def sanitize(run: Run) -> None:
    """compute-sanitizer on a case of every device test that neither compiles nor captures."""
    if run.device == "cpu" or gpu_install.is_rocm():
        reason = "compute-sanitizer is NVIDIA's and needs a CUDA GPU"
        run.results.append(Outcome("sanitizer", "skipped", 0.0, reason))
        print(run.results[-1].line())
        return
    sanitizer = find_sanitizer()
    limits = ["--device", run.device, "--device-tests-only", "-m", "not builds", *TOLD_AT_ONCE]
    # Without torch's cache of memory nothing can be captured.
    limits += ["-k", "not compile and not formula and not graph"]
    limits += ["-p", "ci.sampling", "--cases-per-test", "1"]
    deadline = time.monotonic() + run.share("sanitizer")
    for index, tool in enumerate(TOOLS):
        # Of torch's kernels nothing is asked, and all of them together take minutes.
        checked = [sanitizer, "--tool", tool, "--kernel-name", "kernel_substring=apex"]
        checked += ["--error-exitcode", "9", *PYTEST, *limits]
        run.call_all(
            {
                f"{tool} {package} {part}": [
                    *checked,
                    *("--share", part, f"packages/{package}/tests"),
                ]
                for package, count in processes().items()
                for part in [f"{i + 1}/{count}" for i in range(count)]
            },
            max(1.0, (deadline - time.monotonic()) / (len(TOOLS) - index)),
            # Tensors that share a block of torch's cache would hide a step from one into the next.
            PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        )


def bench(run: Run) -> None:
    """All benchmarks, one after the other, each within its share of what is left."""
    records = gpu_report.records_file(run.out)
    records.unlink(missing_ok=True)
    settings = {
        "APEX_BENCH_DEVICE": run.device,
        "APEX_BENCH_RECORDS": str(records),
        # Of a case; GPUs are quiet, and there are many cases.
        "APEX_BENCH_SECONDS": os.environ.get("APEX_BENCH_SECONDS", "0.3"),
    }
    files = sorted(ROOT.glob("packages/*/benchmarks/bench_*.py"))
    files = [f for f in files if "device" in f.read_text()]  # one is of processes, on CPUs
    wanted = run.benchmarks or {benchmark_name(f) for f in files} - BY_NAME_ALONE
    files = [f for f in files if benchmark_name(f) in wanted]
    deadline = time.monotonic() + run.share("bench")
    runs = [f"{turn}/{TURNS}:{file}" for turn in range(TURNS) for file in files]
    while runs and time.monotonic() < deadline:
        runs = runs[bench_in_one_process(run, runs, deadline - time.monotonic(), settings) :]


def bench_in_one_process(
    run: Run, runs: list[str], seconds: float, settings: dict[str, str]
) -> int:
    """Run benchmarks, each in its turn, until one ends their process; return how many ended."""
    outcomes = run.out / "gpu.outcomes.jsonl"
    outcomes.unlink(missing_ok=True)
    script = str(ROOT / "ci" / "gpu_benchmarks.py")
    command = [sys.executable, script, str(outcomes), str(seconds), *runs]
    whole = run.call("benchmarks", command, seconds + 10, **settings)
    lines = outcomes.read_text().splitlines() if outcomes.is_file() else []
    outcomes.unlink(missing_ok=True)
    for line in map(json.loads, lines):
        run.results.append(Outcome(outcome_name(line.pop("run")), **line))
        print(run.results[-1].line(), flush=True)
    if len(lines) == len(runs):
        return len(runs)
    ended = Outcome(outcome_name(runs[len(lines)]), "failed", 0.0, whole.detail)
    run.results.append(ended)
    return len(lines) + 1


def outcome_name(run: str) -> str:
    """``0/3:packages/.../bench_xentropy.py`` as "bench xentropy, turn 1 of 3"."""
    turn, _, file = run.partition(":")
    number, _, count = turn.partition("/")
    return f"bench {benchmark_name(Path(file))}, turn {int(number) + 1} of {count}"


def benchmark_name(file: Path) -> str:
    return file.stem.removeprefix("bench_")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
