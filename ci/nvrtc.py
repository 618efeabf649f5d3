"""Compile every kernel that the wheels launch by the oldest and the newest NVRTC; no GPU is needed.

python ci/nvrtc.py [OP...]

The names are those that the built libraries list themselves. A kernel that cannot be named outside
of its source, that needs a header which NVRTC lacks, or whose parameters take other bytes there
would fail on a user's GPU alone. Each NVRTC compiles for all architectures that it knows of those
that wheels are for, and of one before; where CI samples, for one of them, drawn at each commit.
"""

import ctypes
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch  # noqa: F401  # the libraries need it

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "shared_csrc"), str(ROOT)]

from native import nvrtc, rtc, toolchain  # noqa: E402
from native.build import build, find_ops  # noqa: E402
from native.errors import BuildError  # noqa: E402
from native.targets import Target  # noqa: E402

from ci import dirty  # noqa: E402
from ci.workspace import MATRIX, leading_ops  # noqa: E402

OUTPUT = ROOT / ".nox" / "kernels" / toolchain.RTC


def main(*words: str) -> None:
    wanted, _ = leading_ops(list(words))
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    kernels = list(itertools.chain(*(kernels_of(p, wanted) for p in packages())))
    compilers = [nvrtc.Nvrtc(path) for path in nvrtc.libraries()]
    versions = {str(compiler) for compiler in compilers}
    if len(versions) < 2 or not kernels:
        sys.exit(f"expected two versions of NVRTC and some kernels, got {versions} and {kernels}")
    failures = []
    for compiler in compilers:
        for arch in architectures(compiler):
            failures += compile_all(compiler, arch, kernels)
    if failures:
        sys.exit("\n".join(["", *failures]))


def packages() -> list[Path]:
    return sorted((ROOT / "packages").iterdir())


def kernels_of(package: Path, wanted: list[str]) -> Iterator[tuple[rtc.Kernel, dict[str, Path]]]:
    """Build the host's half of a package's ops; give each kernel that it lists."""
    ops = [op for op in find_ops(package / "src") if not wanted or op.name in wanted]
    if not ops:
        return
    folder, target = OUTPUT / package.name, Target(toolchain.RTC)
    library = build(ops, [target], folder, package=package.name, portable=True)[target]
    # In the place of torch's library for GPUs, which one for CPUs does not have.
    ctypes.CDLL(str(folder / toolchain.gpu_stub_name(target)), ctypes.RTLD_GLOBAL)
    listed = rtc.listed(ctypes.CDLL(str(library)))
    size = library.stat().st_size
    print(f"{package.name}: {len(ops)} ops, {len(listed)} kernels, {size:,} bytes", flush=True)
    for kernel in listed:
        yield kernel, {op.name: op.folder for op in ops}


def architectures(compiler: nvrtc.Nvrtc) -> list[str]:
    """Return what a compiler is tried for: all that it knows of ours, or where CI samples, one."""
    ours = ["sm_75", *MATRIX["cuda"]["archs"]]
    known = [arch for arch in ours if int(arch.removeprefix("sm_")) in compiler.architectures]
    if os.environ.get("APEX_CI_SAMPLE"):
        return [random.Random(f"NVRTC {compiler} {dirty.seed()}").choice(known)]
    return known


def compile_all(compiler: nvrtc.Nvrtc, arch: str, kernels: list) -> list[str]:
    """Compile the kernels for an architecture; return the complaints."""
    start, slowest = time.monotonic(), (0.0, "")

    def complaint(listed: tuple[rtc.Kernel, dict[str, Path]]) -> str | None:
        nonlocal slowest
        began = time.thread_time()
        try:
            name, program, options = rtc.program(*listed, arch)
            symbol, image = compiler.compile(program, name, options)
        except BuildError as error:
            return f"NVRTC {compiler}, {listed[0].unit.decode()}: {error}"
        slowest = max(slowest, (time.thread_time() - began, name))
        return None if symbol and image.startswith(b"\x7fELF") else f"{name}: gave no machine code"

    with ThreadPoolExecutor(int(os.environ["MAX_JOBS"])) as pool:
        failures = list(filter(None, pool.map(complaint, kernels)))
    print(
        f"NVRTC {compiler} for {arch}: {len(kernels)} kernels, {len(failures)} failed, in "
        f"{time.monotonic() - start:.0f} s; the slowest took {slowest[0]:.1f} s: {slowest[1]}",
        flush=True,
    )
    return failures


if __name__ == "__main__":
    main(*sys.argv[1:])
