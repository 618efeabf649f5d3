"""Which ops a secondary compiler takes in CI: those that changed, and some that cover every header.

Compilers beside the one that builds the wheels tell nothing new of an op whose headers another op
compiles too. Where shared code changed, the sample includes every header of shared_csrc/include,
and other ops at each commit; two more are drawn by lot, so that each op has its turn.

Compilers that take minutes for that have fewer: some of the ops that changed, and every header of
core/ and engine/ alone. What they leave out, the emulated GPU and NVRTC take.
"""

import functools
import os
import random
import sys
from pathlib import Path

from ci import dirty, stages, workspace
from ci.workspace import ROOT, ops

sys.path.insert(0, str(ROOT / "shared_csrc"))

from native import sources

INCLUDE = ROOT / "shared_csrc" / "include"
BY_LOT = 2
SLOW, ENGINES = ("cuda", "hip", "cpu"), ("core", "engine")
MOST = 4  # of the ops that changed, which a slow compiler takes
# Kernels of each op and engine that NVRTC compiles: for the evidence, and for anything else.
LOT, SMALL_LOT = 4, 1


def sample(changed_files: list[str] | None, seed: str, *, slow: bool = False) -> list[str]:
    """Return the ops to compile, sorted; None for the files: git cannot tell, so all of them."""
    folders = op_folders()
    if changed_files is None:
        return sorted(folders)
    own = {op for op, folder in folders.items() if any(_within(f, folder) for f in changed_files)}
    shared = dirty.SHARED in dirty.affected(changed_files)
    lot = random.Random(seed)
    headers = {op: headers_of(folder) for op, folder in folders.items()}
    if slow:
        own = {*lot.sample(sorted(own), min(MOST, len(own)))}
        headers = {op: frozenset(filter(_of_engines, found)) for op, found in headers.items()}
    covering = cover(headers, seed)
    rest = sorted(set(folders) - own)
    by_lot = lot.sample(rest, min(BY_LOT, len(rest)))
    return sorted({*own, *by_lot, *(covering if shared else ())})


def sampled_ops(compiler: str = "") -> list[str]:
    """Return `sample` of this checkout for a compiler, and note it for the table of stages."""
    try:
        files = dirty.changed_files(ROOT, os.environ.get("CI_BASE"))
    except dirty.UNKNOWN:
        files = None
    slow = compiler in SLOW
    chosen = sample(files, f"{dirty.seed()}{compiler if slow else ''}", slow=slow)
    changed, covered = ("some of those", "engines'") if slow else ("those", "all")
    stages.note(
        f"{len(chosen)} of {len(op_folders())} ops: {changed} changed, some that cover {covered} "
        f"headers, {BY_LOT} by lot"
    )
    return chosen


def lot_of_kernels(*for_amd: str) -> list[str]:
    """Return what makes ci/nvrtc.py take a lot of kernels, and note it for the table of stages."""
    if for_amd:
        text = f"by HIPRTC for one: {LOT} kernels of each engine of them, {SMALL_LOT} of a quarter"
    else:
        text = (
            f"all of their kernels for the evidence; of other ops' those of gpu_costs.toml and "
            f"{LOT} of each engine by lot; {SMALL_LOT} of each for another architecture by each "
            "NVRTC"
        )
    stages.note(text)
    return ["--lot"]


def known_to_hipcc(archs: list[str]) -> list[str]:
    """Return the architectures that the hipcc at hand compiles for, and note the others.

    Raises:
        RuntimeError: it compiles for none.
    """
    known = workspace.known_to_hipcc(archs)
    if others := [arch for arch in archs if arch not in known]:
        stages.note(f"left out: {', '.join(others)}, which this hipcc does not know")
    if not known:
        raise RuntimeError(f"this hipcc compiles for no AMD GPU of {', '.join(archs)}")
    return known


def some(names: tuple[str, ...], count: int) -> list[str]:
    """Return as many of the names as CI takes, drawn at each commit; all where it takes all."""
    if not os.environ.get("APEX_CI_SAMPLE"):
        return list(names)
    chosen = random.Random(f"some {dirty.seed()}").sample(names, count)
    stages.note(f"tests of {', '.join(chosen)} alone, drawn from {len(names)}")
    return chosen


@functools.cache
def op_folders() -> dict[str, Path]:
    return {
        op: next((ROOT / "packages" / p / "src").rglob(f"{op}/{op}.cpp")).parent
        for op, p in ops().items()
    }


def _of_engines(header: Path) -> bool:
    return header.relative_to(INCLUDE).parts[1] in ENGINES


def _within(file: str, folder: Path) -> bool:
    return (ROOT / file).is_relative_to(folder)


@functools.cache  # no source changes while CI draws
def headers_of(folder: Path) -> frozenset[Path]:
    """Return the shared headers that an op's sources include, directly or not."""
    found = set().union(*(sources.included(source) for source in folder.glob("*.cpp")))
    return frozenset(path for path in found if path.is_relative_to(INCLUDE))


def cover(headers: dict[str, frozenset[Path]], seed: str) -> list[str]:
    """Return ops that together include every header: few, and by lot where there is a choice."""
    lot = random.Random(seed)
    left, chosen = set().union(*headers.values()), []
    users = {header: [op for op in sorted(headers) if header in headers[op]] for header in left}
    while left:
        rarest = min(sorted(left), key=lambda header: len(users[header]))
        weights = [len(headers[op] & left) ** 2 for op in users[rarest]]
        chosen.append(lot.choices(users[rarest], weights)[0])
        left -= headers[chosen[-1]]
    for op in list(chosen):  # those that a later one made superfluous
        others = set().union(*(headers[other] for other in chosen if other != op))
        if headers[op] <= others:
            chosen.remove(op)
    return chosen
