"""Compile every op of every package for a GPU backend; no GPU is needed, and nothing is run.

python ci/kernels.py cuda|hip ARCHITECTURE... [-- OP...]

Ops are compiled whole, kernels and host's half, as wheels with prebuilt kernels have them. What
the machine code shows, ci/nvrtc.py reads of what NVRTC makes.

With APEX_CI_SAMPLE, an op is compiled for one of the architectures, drawn by lot at each commit:
the emulated GPU runs all kernels, and most faults show on any architecture.
"""

import os
import random
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "shared_csrc"), str(ROOT)]

from native.build import Op, build, find_ops  # noqa: E402
from native.errors import BuildError  # noqa: E402
from native.targets import Target  # noqa: E402

from ci import dirty  # noqa: E402
from ci.workspace import leading_ops  # noqa: E402

# Torch's and the toolkits' own headers are compiled with -isystem, so what is left is ours.
WARNING = re.compile(r"\bwarning\b", re.IGNORECASE)
# Of these, no one can do anything in a kernel's source; the last is of ROCm 7, where it declines.
NOISE = re.compile(
    r"\d+ warnings? generated|argument unused during compilation|loop not unrolled: the optimizer"
)

# Before LLVM 19, after this pass another one may not end (llvm/llvm-project, pull request 82099).
HIPCC_FLAGS = {"HIPCC_COMPILE_FLAGS_APPEND": "-mllvm -amdgpu-sdwa-peephole=0"}
OUTPUT = ROOT / ".nox" / "kernels"
Group = tuple[str, tuple[str, ...]]  # a package, and architectures


def main(backend: str, *words: str) -> None:
    end = words.index("--") if "--" in words else len(words)
    archs, wanted = words[:end], leading_ops(words[end + 1 :])[0]
    ops = grouped(archs, wanted)

    def compile_together(group: Group) -> list[str]:
        package, some = group
        start = time.monotonic()
        folder = OUTPUT / backend / "-".join([package, *(() if some == archs else some)])
        try:
            build(ops[group], [Target(backend, archs=some)], folder, package=package)
        except BuildError as error:
            return [str(error)]
        names, took = ", ".join(op.name for op in ops[group]), time.monotonic() - start
        print(f"{package} for {', '.join(some)}: {names} in {took:.0f} s", flush=True)
        return [f"{package}: {line}" for line in worth_reading((folder / "build.log").read_text())]

    if backend == "hip":
        os.environ.update(HIPCC_FLAGS)
    # Two at a time: a package of one op would leave the other cores idle.
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    largest_first = sorted(ops, key=lambda group: -sum(len(op.sources) for op in ops[group]))
    with ThreadPoolExecutor(2) as pool:
        failures = [line for lines in pool.map(compile_together, largest_first) for line in lines]
    if failures:
        sys.exit("\n".join(["", *failures]))


def grouped(archs: tuple[str, ...], wanted: list[str]) -> dict[Group, list[Op]]:
    """Return the ops by package, and by what they are compiled for."""
    ops: dict[Group, list[Op]] = {}
    for package in sorted((ROOT / "packages").iterdir()):
        for op in chosen(find_ops(package / "src"), wanted):
            ops.setdefault((package.name, archs_of(op, archs)), []).append(op)
    return ops


def archs_of(op: Op, archs: tuple[str, ...]) -> tuple[str, ...]:
    """Return what an op is compiled for: all, or where CI samples, one."""
    if not os.environ.get("APEX_CI_SAMPLE"):
        return archs
    return (random.Random(f"{dirty.seed()} {op.name}").choice(archs),)


def chosen(ops: list[Op], wanted: list[str]) -> list[Op]:
    """Return the wanted ones; all where none is named."""
    return [op for op in ops if not wanted or op.name in wanted]


def worth_reading(log: str) -> list[str]:
    """Return the lines of compiler warnings, each once."""
    lines = [line for line in log.splitlines() if WARNING.search(line) and not NOISE.search(line)]
    return list(dict.fromkeys(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
