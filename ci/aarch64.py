"""Cross-compile every op for arm64 and check that its wheel would load: no arm64 machine is needed.

python ci/aarch64.py [OP...]

Kernels are compiled and linked as for a wheel, but for torch: an empty library of that name takes
its place, and what kernels take from torch stays undefined, as it does in every wheel. Then
ci/check_wheel.py reads what the libraries need of a system. `nox -s "kernels(aarch64)"` also runs
the tests of shared_csrc/ that need no torch, under qemu.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "shared_csrc"), str(ROOT)]

from native.build import Op, build, find_ops  # noqa: E402
from native.errors import BuildError  # noqa: E402
from native.targets import Target  # noqa: E402

from ci import check_wheel  # noqa: E402

CXX = "aarch64-linux-gnu-g++"
OUTPUT = ROOT / ".nox" / "kernels" / "aarch64"


def main(*wanted: str) -> None:
    stub = empty_torch(OUTPUT / "torch")
    os.environ["CXX"] = f"{CXX} -L{stub.parent}"
    failures = []
    for package in sorted((ROOT / "packages").iterdir()):
        ops = [op for op in find_ops(package / "src") if not wanted or op.name in wanted]
        if ops:
            failures += [f"{package.name}: {line}" for line in complaints(package.name, ops)]
    if failures:
        sys.exit("\n".join(["", *failures]))


def empty_torch(folder: Path) -> Path:
    """Make an arm64 library that the linker takes for torch's."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libtorch_cpu.so"
    command = [CXX, "-shared", "-x", "c++", os.devnull, "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def complaints(package: str, ops: list[Op]) -> list[str]:
    """Compile and link a package's ops; return warnings, and what keeps them from loading."""
    start = time.monotonic()
    log = OUTPUT / package / "build.log"
    try:
        (library,) = build(
            ops, [Target("cpu")], log.parent, package=package, portable=True
        ).values()
    except BuildError as error:
        return [str(error)]
    with library.open("rb") as file:
        machine = check_wheel.ELFFile(file)["e_machine"]
    found = [line for line in log.read_text().splitlines() if "warning:" in line]
    if machine != "EM_AARCH64":
        found.append(f"{library.name} is for {machine}: {CXX} is not a compiler for arm64")
    names = ", ".join(op.name for op in ops)
    print(f"{package}: {names} in {time.monotonic() - start:.0f} s", flush=True)
    return [*found, *check_wheel.library_complaints(library, None)]


if __name__ == "__main__":
    main(*sys.argv[1:])
