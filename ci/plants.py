"""Plant faults, one at a time, and say whether the emulated GPU's tests find them.

python ci/plants.py            every fault of plants.toml, on its op
python ci/plants.py NAME...    some of them
python ci/plants.py every      those that are marked so, on every op of their engine

A copy of the tree in .nox/plants gets the fault. The op is built there for the emulator, and its
tests run until the first one fails, as `nox -s emulate -- OP` runs them. Before that they must pass
without a fault. Exits 1 if a fault was not found.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from ci import launches, workspace  # noqa: E402
from ci.workspace import tomllib  # noqa: E402

LIST = ROOT / "ci" / "plants.toml"
COPY = ROOT / ".nox" / "plants"
# Engines that others consist of, or that have another name where ops call them.
CALLS = {
    "rowwise": r"rowwise(_colwise|_segment_sum)?\(",
    "colwise": r"(rowwise_)?colwise(_each)?\(",
    "colwise_each": r"colwise_each\(",
    "segment_sum": r"(rowwise_)?segment_sum\(|cell_sums\(",
    "foreach": r"foreach<",
    "foreach_fold": r"foreach_fold<",
    "foreach_reduce": r"foreach_reduce<",
    "colwise_rowwise": r"colwise_rowwise\(",
    "samplewise": r"samplewise\(",
    "tiles": r"(rowwise_)?colwise(_rowwise|_each)?\(|columns_each\(|moments_of_matrix\(",
}


@dataclass(frozen=True)
class Plant:
    name: str
    engine: str
    file: str
    text: str
    replacement: str
    breaks: str
    op: str
    each_op: bool = False
    way: str = ""

    def apply(self, root: Path) -> None:
        """Write the fault into the tree at ``root``.

        Raises:
            ValueError: the text does not stand there exactly once.
        """
        path = root / self.file
        source = path.read_text()
        if source.count(self.text) != 1:
            raise ValueError(
                f"{self.name}: expected its text once in {self.file}, "
                f"found it {source.count(self.text)} times; mend ci/plants.toml"
            )
        path.write_text(source.replace(self.text, self.replacement))


def plants() -> list[Plant]:
    return [Plant(**entry) for entry in tomllib.loads(LIST.read_text())["plant"]]


def ops_of(engine: str) -> list[str]:
    """Return the ops whose sources call the engine."""
    found = set()
    for path in workspace.files("packages/*.cpp", "packages/*.h"):
        if re.search(rf"\b({CALLS[engine]})", path.read_text()):
            found.add(path.parent.name)
    return sorted(found & set(workspace.ops()))


def on_every_op() -> Iterator[tuple[Plant, str]]:
    """Yield faults and all ops of their engines but those that do not go the fault's way."""
    unseen = {(op, way) for (op, _), ways in launches.accepted_ways().items() for way in ways}
    for plant in plants():
        if plant.each_op:
            yield from ((plant, op) for op in ops_of(plant.engine) if (op, plant.way) not in unseen)


def wanted(words: list[str]) -> Iterator[tuple[Plant, str]]:
    """Yield faults and the ops that they are tried on; exit where a name is unknown."""
    known = plants()
    if words == ["every"]:
        yield from on_every_op()
        return
    unknown = [word for word in words if word not in {p.name for p in known}]
    if unknown:
        names = ", ".join(p.name for p in known)
        sys.exit(f"there is no plant {unknown[0]}; expected `every`, or some of {names}")
    yield from ((p, p.op) for p in known if not words or p.name in words)


def put(name: Path | str) -> None:
    """Copy a file where it differs: newer, then, than all that was built with a fault in it."""
    path, copied = ROOT / name, COPY / name
    if copied.is_file() and copied.read_bytes() == path.read_bytes():
        return
    copied.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, copied, follow_symlinks=False)
    if not copied.is_symlink():
        shutil.copymode(path, copied)


def copy_tree() -> None:
    """Copy what git tracks or would; what was built there before stays, and saves time."""
    for path in workspace.files():
        put(path.relative_to(ROOT))
    # What the tree's files are, its scripts ask git.
    subprocess.run(["git", "init", "--quiet", str(COPY)], check=True, timeout=60)
    for package in workspace.PACKAGES:  # what an editable install has made, git ignores
        sources = ROOT / "packages" / package / "src"
        for link in (*sources.rglob("_shared"), sources / "apex" / "__init__.py"):
            copied = COPY / link.relative_to(ROOT)
            if not copied.is_symlink():
                copied.symlink_to(os.readlink(link))


def failure(*ops: str) -> str:
    """Run the ops' emulated tests in the copy; return what they print if one fails, else nothing.

    In one process: the first failure mostly comes before a second one has imported torch.
    """
    sources = os.pathsep.join(str(COPY / "packages" / p / "src") for p in workspace.PACKAGES)
    command = [sys.executable, "ci/emulate.py", *ops, "-x", "-n", "0", "--no-header", "--tb=no"]
    variables = {**os.environ, "PYTHONPATH": sources}
    done = subprocess.run(
        command, cwd=COPY, env=variables, capture_output=True, text=True, check=False, timeout=3600
    )
    if done.returncode == 0:
        return ""
    if not re.search(r"^\d+ failed", done.stdout, re.MULTILINE):
        sys.exit(f"no test of {ops} ran:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout[-3000:]


def try_plant(plant: Plant, op: str) -> bool:
    """Whether the tests of an op with the fault fail; exit where they do not get so far."""
    put(plant.file)
    plant.apply(COPY)
    is_found = bool(failure(op))
    put(plant.file)
    return is_found


def check_without_faults(ops: list[str]) -> None:
    """Exit if a test fails anyhow: it would find every fault."""
    if text := failure(*ops):
        sys.exit(f"without a fault, tests of {', '.join(ops)} fail:\n{text}")


def main(*words: str) -> None:
    tries = list(wanted(list(words)))
    missed, first = [], time.monotonic()
    copy_tree()
    check_without_faults(sorted({op for _, op in tries}))
    for plant, op in tries:
        start = time.monotonic()
        is_found = try_plant(plant, op)
        minutes = (time.monotonic() - start) / 60
        verdict = "found" if is_found else "NOT FOUND"
        print(f"{verdict}: {plant.name} on {op}, {minutes:.1f} min: {plant.breaks}", flush=True)
        if not is_found:
            missed.append(plant.name)
    print(figure(len(tries) - len(missed), len(tries), time.monotonic() - first))
    sys.exit(bool(missed))


def figure(found: int, tried: int, seconds: float) -> str:
    """``37 of 38 found (97 %) in 41 min``."""
    return f"{found} of {tried} found ({100 * found // max(tried, 1)} %) in {seconds / 60:.0f} min"


if __name__ == "__main__":
    main(*sys.argv[1:])
