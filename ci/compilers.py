"""Check that a C++ compiler takes every op of every package for the CPU, without a warning.

python ci/compilers.py COMPILER [OP...]

It parses and instantiates all templates, at the highest ISA level and at the lowest, but writes no
machine code, which would take ten times as long.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "shared_csrc"), str(ROOT)]

from native import toolchain  # noqa: E402
from native.build import find_ops  # noqa: E402
from native.targets import Target, cpu_levels  # noqa: E402

LEVELS = dict.fromkeys((cpu_levels()[0], "baseline"))


def main(cxx: str, *wanted: str) -> None:
    os.environ["CXX"] = cxx
    compiler = toolchain.find_cxx()
    packages = sorted((ROOT / "packages").iterdir())
    ops = [op for p in packages for op in find_ops(p / "src")]
    sources = [s for op in ops if not wanted or op.name in wanted for s in op.sources]
    jobs = [(source, level) for source in sources for level in LEVELS]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        failures = list(filter(None, pool.map(lambda job: complaints(compiler, *job), jobs)))
    print(f"{cxx}: {len(sources)} sources at {', '.join(LEVELS)}, {len(failures)} failed")
    if failures or not sources:
        sys.exit("\n".join(failures))


def complaints(compiler: list[str], source: Path, level: str) -> str:
    """Return what the compiler says of a source, errors and warnings; empty if it is content."""
    target = Target("cpu", level)
    flags = toolchain.compile_flags(target) + toolchain.include_flags(target)
    command = [*compiler, *flags, "-fsyntax-only", f"-I{source.parent}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    said = done.stderr if done.returncode or "warning:" in done.stderr else ""
    return f"{source.relative_to(ROOT)} at {level}:\n{said}" if said else ""


if __name__ == "__main__":
    main(*sys.argv[1:])
