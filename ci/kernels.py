"""Compile every op of every package for a GPU backend; no GPU is needed, and nothing is run.

python ci/kernels.py cuda|hip ARCHITECTURE...
"""

import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "shared_csrc"))

from native.build import build, find_ops  # noqa: E402
from native.errors import BuildError  # noqa: E402
from native.targets import Target  # noqa: E402

# Torch's and the toolkits' own headers are compiled with -isystem, so what is left is ours.
WARNING = re.compile(r"\bwarning\b", re.IGNORECASE)
# Of these, no one can do anything in a kernel's source.
NOISE = re.compile(r"\d+ warnings? generated|argument unused during compilation")


def main(backend: str, *archs: str) -> None:
    target = Target(backend, archs=archs)
    failures = []
    for package in sorted((ROOT / "packages").iterdir()):
        ops = find_ops(package / "src")
        if not ops:
            continue
        start = time.monotonic()
        folder = ROOT / ".nox" / "kernels" / backend / package.name
        try:
            build(ops, [target], folder, package=package.name)
        except BuildError as error:
            failures.append(str(error))
            continue
        warnings = worth_reading((folder / "build.log").read_text())
        failures += [f"{package.name}: {line}" for line in warnings]
        names = ", ".join(op.name for op in ops)
        print(f"{package.name}: {names} in {time.monotonic() - start:.0f} s", flush=True)
    if failures:
        sys.exit("\n".join(["", *failures]))


def worth_reading(log: str) -> list[str]:
    """Return the lines of compiler warnings, each once."""
    lines = [line for line in log.splitlines() if WARNING.search(line) and not NOISE.search(line)]
    return list(dict.fromkeys(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
