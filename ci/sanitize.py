"""Call all raw operators at random, built whole under AddressSanitizer and UBSan.

python ci/sanitize.py [CALLS] [PYTEST ARGUMENTS]

CALLS is how many each of the two runs makes, with one thread and with two; 25,000 without it. A
refused call must have changed nothing, and no call may touch memory that is not an operand's. The
first error of a sanitizer ends the process, and its report says where it was.
"""

import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "shared_csrc"), str(ROOT)]

from native import jit, toolchain  # noqa: E402

from ci.emulate import all_ops  # noqa: E402

WORK = ROOT / ".nox" / "sanitized"
TESTS = "ci/tests/test_raw_operators.py"
# Behind the builder's own flags: -O3 with sanitizers takes four times as long to compile.
FLAGS = ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
# Python itself is not sanitized. Its leaks are not ours, and memory that is not there is an error.
# So is memory of which there may not be so much: the marks of huge tensors took 16 GB in the end.
OPTIONS = "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=256"
LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so.6")


def main(*words: str) -> None:
    start = time.monotonic()
    calls, arguments = (
        ("25000", words) if not words or not words[0].isdigit() else (words[0], words[1:])
    )
    compiler = toolchain.find_cxx()
    os.environ |= {
        "CXX": str(wrapper(compiler)),
        "APEX_CACHE_DIR": str(WORK / "cache"),
        "MAX_JOBS": "1",
        "APEX_RAW_CALLS": calls,
    }
    target = jit.target_of("cpu")
    ops = list(all_ops())
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda op: jit.build_op(op[1], target, package=op[0]), ops))
    print(f"{len(ops)} ops built in {time.monotonic() - start:.0f} s", flush=True)
    preloaded = " ".join(library(compiler, name) for name in LIBRARIES)
    environment = os.environ | {"LD_PRELOAD": preloaded, "ASAN_OPTIONS": OPTIONS}
    command = [sys.executable, "-m", "pytest", "-q", "-s", "--timeout", "0", TESTS, *arguments]
    sys.exit(subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode)


def wrapper(compiler: list[str]) -> Path:
    """A compiler for the builder: its options behind those that the builder gives."""
    path = WORK / "cxx"
    WORK.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {shlex.join(compiler)} "$@" {shlex.join(FLAGS)}\n')
    path.chmod(0o755)
    return path


def library(compiler: list[str], name: str) -> str:
    """Where the compiler has a library that must be loaded before Python's own."""
    command = [*compiler, f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        sys.exit(f"sanitize: {shlex.join(compiler)} has no {name}. Use g++: set CXX=g++.")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
