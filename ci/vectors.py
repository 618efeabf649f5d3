"""Show that the engines' loops over lanes are vectors on the CPU, from g++'s own report.

python ci/vectors.py [OP...]

The loops are those that APEX_VECTORIZE marks. Each is compiled once per op and type; one that stays
scalar takes several times as long, and nothing else would tell. It fails the run unless
ci/accepted_kernels.toml counts it for its op.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "shared_csrc"), str(ROOT)]

from native import toolchain  # noqa: E402
from native.build import find_ops  # noqa: E402
from native.targets import Target, cpu_levels  # noqa: E402

from ci.workspace import tomllib  # noqa: E402

MARK = re.compile(r"\s*APEX_VECTORIZE(_FEW)?\s*$")
VERDICT = re.compile(
    r"(?P<file>[^\n]+?):(?P<line>\d+):\d+: "
    r"(?:(?P<vector>optimized: +loop vectorized)|missed: +couldn't vectorize loop)"
    r"(?=[^\n]*\n(?P<reason>[^\n]*))"  # the next line, which may be a verdict itself
)


def main(*wanted: str) -> None:
    packages = sorted((ROOT / "packages").iterdir())
    ops = [op for p in packages for op in find_ops(p / "src")]
    ops = [op for op in ops if not wanted or op.name in wanted]
    loops = marked_loops(
        f for folder in ("shared_csrc", "packages") for f in headers(ROOT / folder)
    )
    jobs = [(op.name, source) for op in ops for source in op.sources]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = list(pool.map(lambda job: (job[0], *verdicts(report(job[1]), loops)), jobs))
    vectors, scalars = Counter(), {}
    for op, of_source, missed in found:
        vectors[op] += of_source
        scalars.setdefault(op, []).extend(missed)
    for op, count in sorted(vectors.items()):
        print(f"{op:<32}{count:>6} vector loops{len(scalars[op]):>6} scalar")
    accepted = tomllib.loads((ROOT / "ci" / "accepted_kernels.toml").read_text()).get("scalar", [])
    complaints = judge(scalars, accepted, all_of_them=not wanted)
    if not sum(vectors.values()):
        complaints.append("no loop became a vector: nothing was compiled, or the marks are gone")
    if complaints:
        sys.exit("\n".join(["", *complaints]))


def headers(folder: Path) -> list[Path]:
    return [f for f in folder.rglob("*.h") if "_shared" not in f.parts and ".nox" not in f.parts]


def marked_loops(files) -> set[tuple[Path, int]]:
    """Return file and line of each loop that follows a mark."""
    return {
        (file.resolve(), number + 1)
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if MARK.match(line)
    }


def report(source: Path) -> str:
    """Compile a source at the highest ISA level; return what the compiler says of its loops."""
    target = Target("cpu", cpu_levels()[0])
    flags = toolchain.compile_flags(target) + toolchain.include_flags(target)
    command = [*toolchain.find_cxx(), *flags, "-fopt-info-vec-optimized-missed"]
    command += [f"-I{source.parent}", "-c", str(source), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{source} does not compile, or not by g++:\n{done.stderr[:3000]}")
    return done.stderr


def verdicts(said: str, loops: set[tuple[Path, int]]) -> tuple[int, list[str]]:
    """Return how many of these loops became vectors, and a line for each that did not."""
    vectors, scalars = 0, []
    for verdict in VERDICT.finditer(said):
        loop = (Path(verdict["file"]).resolve(), int(verdict["line"]))
        if loop not in loops:
            continue
        if verdict["vector"]:
            vectors += 1
        else:
            reason = verdict["reason"].partition("missed:")[2].strip()
            scalars.append(f"{loop[0].name}:{loop[1]}: {reason}")
    return vectors, scalars


def judge(scalars: dict[str, list[str]], accepted: list[dict], all_of_them: bool) -> list[str]:
    """Return what is wrong: scalar loops beyond those accepted, and entries without a reason."""
    counts = {entry["op"]: entry["loops"] for entry in accepted}
    complaints = []
    for op, lines in scalars.items():
        if len(lines) > counts.get(op, 0):
            complaints.append(
                f"{op}: {len(lines)} loops over lanes stay scalar (accepted: {counts.get(op, 0)}). "
                "Make them vectors, or count them with a reason in ci/accepted_kernels.toml:"
            )
            complaints += [f"    {line}" for line in lines]
    for entry in accepted:
        if not entry.get("reason"):
            complaints.append(f"ci/accepted_kernels.toml: scalar loops of {entry['op']}: no reason")
        if all_of_them and not scalars.get(entry["op"]):
            complaints.append(f"ci/accepted_kernels.toml: {entry['op']} has no scalar loop")
    return complaints


if __name__ == "__main__":
    main(*sys.argv[1:])
