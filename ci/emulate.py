"""Run the packages' device tests on the emulated GPU, warps of 32 and of 64 lanes.

python ci/emulate.py [OP...] [PYTEST ARGUMENTS]

Every op that is found is compiled for the emulator (docs/guides/gpu-without-a-gpu.md) and serves
the tests' CPU tensors. Of every test function a few cases run; a case whose operands are too large
to emulate is skipped with that reason. A function that is tested over shapes has a case of each.
The run prints which ways of the engines were compared (ci/launches.py), and fails where one was
not. Planted bugs show that the emulator finds what it claims. Where ops are named, these alone are
compiled, and their test files run; with further arguments, ways are printed and may be missing.
.ci/run names a sample of ops (ci/cover.py).
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "shared_csrc"), str(ROOT)]

from native import jit, toolchain, trust  # noqa: E402
from native.build import Op, build, find_ops  # noqa: E402
from native.targets import Target  # noqa: E402

from ci import costs, launches  # noqa: E402
from ci.workspace import leading_ops, op_tests  # noqa: E402

WORK = ROOT / ".nox" / "emulated"
CASES_PER_TEST = 3
# Emulation takes up to 5 us per element; this keeps a launch below a second or two.
# Four lists of 16-bit numbers may have more than a chunk of 65,536 elements.
MAX_OPERAND_BYTES = 524 << 10
# Lanes of a warp, and the seed of the order in which threads run. Each launch is repeated in a
# second order, which must give the same bits.
RUNS = ({"APEX_EMULATE": "32"}, {"APEX_EMULATE": "64", "APEX_EMULATE_SEED": "7"})
ORDERS = "2"
PLANTED = "shared_csrc/tests/emulation"


def main(*words: str) -> None:
    start = time.monotonic()
    cores = str(len(os.sched_getaffinity(0)))
    wanted, arguments = leading_ops(words)
    ops = build_ops(wanted)
    print(f"{len(ops)} ops built in {time.monotonic() - start:.0f} s", flush=True)
    tests = chosen_tests(wanted, arguments)
    options = [
        "-q",
        "-rs",
        "-n",
        cores,
        "-o",
        "apex_threads=1",
        "-p",
        "ci.sampling",
        "-p",
        "ci.launches",
        "-p",
        "ci.emulate",
    ]
    options += ["--cases-per-test", str(CASES_PER_TEST), "--device-tests-only", "--device", "cpu"]
    is_sample = bool(os.environ.get("APEX_CI_SAMPLE")) and not arguments
    codes = [run_pytest({}, "-q", "-n", cores, PLANTED)] if is_sample or not words else []
    notes = Path(tempfile.mkdtemp(prefix="launches-"))
    for turn, run in enumerate(RUNS):
        print(f"warps of {run['APEX_EMULATE']} lanes", flush=True)
        note = {launches.FOLDER: str(notes)}
        turns = ["--every-shape", str(turn)]
        codes.append(run_pytest(run | note, *options, *turns, *tests, *arguments))
        if codes[-1] and "-x" in arguments:
            break
    print(f"emulated in {time.monotonic() - start:.0f} s")
    wrong = launches.report(notes, ops)
    shutil.rmtree(notes)
    print("\n".join(wrong))
    costs_changed = [] if arguments else costs.with_advice(costs.check_calls(ops))
    print("\n".join(costs_changed))
    print(f"costs counted in {time.monotonic() - start:.0f} s")
    sys.exit(max(codes) or bool((wrong and not arguments) or costs_changed))


def chosen_tests(wanted: list[str], arguments: list[str]) -> list[str]:
    """Return the test files of the ops; without any, all packages' tests or what pytest is told."""
    if wanted:
        return list(dict.fromkeys(test for op in wanted for test in op_tests(op)))
    return [] if arguments else [f"packages/{package.name}/tests" for package in packages()]


def packages() -> list[Path]:
    return sorted((ROOT / "packages").iterdir())


def all_ops():
    """Yield every op of every package, with the package's name for messages and for the cache."""
    for package in packages():
        for op in find_ops(package / "src"):
            yield package.name.replace("-", "."), op


def build_ops(wanted: list[str]) -> list[str]:
    """Compile the wanted ops, or all, and what stands for BLAS libraries; return their names."""
    os.environ |= {"APEX_CACHE_DIR": str(WORK / "cache"), "MAX_JOBS": "1"}
    ops = [(package, op) for package, op in all_ops() if not wanted or op.name in wanted]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(build_op, ops))
    os.environ["APEX_EMULATE_BLASLT"] = str(build_fake_blaslt())
    return sorted(op.name for _, op in ops)


def build_op(named: tuple[str, Op]) -> None:
    """Compile in a folder that is kept, so that ninja repeats little; then fill the cache."""
    package, op = named
    target = Target("emu")
    built = build([op], [target], WORK / package / op.name, package=package)[target]
    library = jit.library_path(op, target, package=package)
    trust.make_private_folder(library.parent)
    shutil.copy(built, library)
    trust.seal_path(library).write_text(trust.seal(library))


def build_fake_blaslt() -> Path:
    """Compile what the emulated GPU has in place of cuBLASLt and hipBLASLt."""
    library = WORK / "libblaslt_fake.so"
    source = ROOT / "shared_csrc" / "tests" / "blaslt_fake.cpp"
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", f"-I{toolchain.INCLUDE}"]
    command = [*toolchain.find_cxx(), *flags, str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=300)
    return library


def run_pytest(environment: dict[str, str], *arguments: str) -> int:
    limits = {"APEX_EMULATE_MAX_BYTES": str(MAX_OPERAND_BYTES), "APEX_EMULATE_ORDERS": ORDERS}
    if not environment:
        limits = {}
    command = [sys.executable, "-m", "pytest", "--timeout", "300", *arguments]
    variables = {**os.environ, **limits, **environment, **costs.ONE_PROCESS}
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


# What follows is a pytest plugin, see `options`.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.excinfo is not None and "emulated GPU: too large" in str(call.excinfo.value):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1], str(call.excinfo.value))
    return report


if __name__ == "__main__":
    main(*sys.argv[1:])
