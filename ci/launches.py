"""Which ways through the GPU engines the emulated launches took, and which were compared.

The emulator writes a line for each launch (shared_csrc/emulation/trace.cpp). As a pytest plugin,
this module keeps those of tests that passed and compared numbers with a formula in PyTorch; the
rest is for `ci/emulate.py`, which prints, for each op, the ways that were compared. A way of an
engine that no compared row of the op took is an error, unless `accepted_ways.toml` has a reason.
"""

import functools
import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from ci import ptxas

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ACCEPTED = Path(__file__).with_name("accepted_ways.toml")
FOLDER = "APEX_LAUNCHES"  # the variable that names the folder of notes
TRACE = "APEX_EMULATE_TRACE"
# Comparisons that a test has with numbers from elsewhere; but not those of a function with itself:
# a kernel that is wrong is wrong twice in the same way.
COMPARISONS = ("assert_as_accurate_as", "assert_close", "equal")
WITH_ITSELF = "assert_same_bits"


@dataclass(frozen=True)
class Traffic:
    """Loads, or stores and atomics, of a launch: shared_csrc/emulation/counts.h says of what."""

    accesses: int
    bytes: int
    sectors: int
    needed: int
    distinct: int


@dataclass(frozen=True)
class Counted:
    """What a line of the trace has beside, where APEX_EMULATE_COUNTS is set."""

    touching: int  # threads that used an operand at all
    shared_bytes: int
    loads: Traffic
    stores: Traffic
    # Bytes that the launch read and wrote of operands, by address and when the operand was made.
    operands: dict[tuple[int, int], tuple[int, int]]

    @classmethod
    def parse(cls, threads: str, loads: str, stores: str, operands: str) -> "Counted":
        threads, loads, stores, facts = (
            tuple(map(int, text.split())) for text in (threads, loads, stores, operands)
        )
        each = zip(facts[::4], facts[1::4], facts[2::4], facts[3::4], strict=True)
        of = {(address, made): (read, written) for address, made, read, written in each}
        return cls(*threads, Traffic(*loads), Traffic(*stores), of)


@dataclass(frozen=True)
class Launch:
    """A line of the trace: where a kernel is, its grid, its numbers, how memory was used."""

    library: str
    offset: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    numbers: tuple[int, ...]
    # Elements of the largest operand that was used by packs, by single elements, and by both.
    packs: int
    singles: int
    both: int
    counted: Counted | None = None

    @classmethod
    def parse(cls, line: str) -> "Launch":
        where, grid, block, numbers, used, *more = line.rstrip("\n").split("\t")
        library, offset = where.rsplit(" ", 1)
        grid, block, numbers, used = (
            tuple(map(int, text.split())) for text in (grid, block, numbers, used)
        )
        counted = Counted.parse(*more) if more else None
        return cls(library, int(offset, 16), grid, block, numbers, *used, counted)


# The ways of each kernel, by a part of their names. Which of them a launch took is in `ways`, and
# an op that launches the kernel must have each way of the second column compared.


def memory(launch: Launch, least: int = 1) -> set[str]:
    """How elements were loaded; an operand of up to `least` of them is a number, no row."""
    named = {
        "packs": launch.packs or launch.both,
        "a rest behind packs": launch.both,
        "single elements": launch.singles > least,
    }
    return {way for way, taken in named.items() if taken}


def of_rows(launch: Launch) -> set[str]:
    rows, _ = launch.numbers[:2]
    way = "several rows a block" if launch.block[1] > 1 else "a row a block"
    return memory(launch, rows) | {way}


def of_rows_and_columns(launch: Launch) -> set[str]:
    rows, _ = launch.numbers[:2]
    stays = rows > launch.grid[0] * launch.block[1]
    return of_rows(launch) | ({"several rows a thread"} if stays else set())


def of_merges(launch: Launch) -> set[str]:
    splits = launch.numbers[0]
    return {"one split" if splits == 1 else "2 to 32 splits" if splits <= 32 else "more splits"}


def of_lists(launch: Launch) -> set[str]:
    (tensors,) = launch.numbers[:1]
    found = memory(launch) | {"one tensor" if tensors == 1 else "several tensors"}
    return found | ({"several blocks of a tensor"} if launch.grid[0] > tensors else set())


def of_ranks(launch: Launch) -> set[str]:
    rows, segments = launch.numbers[:2]
    has_segments = launch.grid[0] * launch.block[0] > rows + segments
    return {
        "one chunk" if rows <= 1024 else "several chunks",
        "segments too" if has_segments else "rows alone",
    }


def of_digits(launch: Launch) -> set[str]:
    (place,) = launch.numbers[:1]
    return {
        "one tile" if launch.grid[0] == 1 else "several tiles",
        "the first digit" if place == 0 else "further digits",
    }


def of_segments(launch: Launch) -> set[str]:
    rows, segments, heads = launch.numbers[:3]
    found = memory(launch, max(rows, segments))
    return found | {"sums of parts before" if heads else "one part"}


def of_tiles(launch: Launch) -> set[str]:
    rows, tiles, packs = launch.numbers[:3]
    rows_of_threads = launch.block[0] // packs
    found = memory(launch) & {"packs", "single elements"}
    return found | {
        "one block of rows" if launch.grid[1] == 1 else "several blocks of rows",
        "one tile" if tiles == 1 else "several tiles",
        "several turns" if rows > 4 * rows_of_threads else "one turn",
    }


def of_samples(launch: Launch) -> set[str]:
    return {"one sample" if launch.grid[0] == 1 else "several samples"}


MEMORY = {"packs", "a rest behind packs", "single elements"}
TILES = {"packs", "single elements", "several blocks of rows", "several tiles", "several turns"}
KERNELS = {
    "rowwise_kernel": (
        of_rows,
        MEMORY | {"several rows a block", "a row a block"},
    ),
    "rowwise_columns": (
        of_rows_and_columns,
        {"packs", "several rows a block", "a row a block", "several rows a thread"},
    ),
    "column_packs": (of_tiles, TILES),
    "sample_sums": (of_tiles, TILES),
    "sample_rows": (of_tiles, TILES),
    "split_rows": (of_tiles, TILES),
    "tile_rows": (of_tiles, TILES),
    "colwise_merge": (of_merges, {"more splits"}),
    "foreach_kernel": (of_lists, MEMORY | {"several tensors", "several blocks of a tensor"}),
    "foreach_fold_chunks": (of_lists, MEMORY | {"several tensors", "several blocks of a tensor"}),
    "foreach_reduce_chunks": (of_lists, MEMORY | {"several tensors", "several blocks of a tensor"}),
    "segment_ranks": (
        of_ranks,
        {"one chunk", "several chunks", "segments too", "rows alone"},
    ),
    "segment_moves": (of_digits, {"several tiles", "the first digit", "further digits"}),
    "segment_sums": (of_segments, MEMORY | {"one part", "sums of parts before"}),
    "samplewise_kernel": (of_samples, {"several samples"}),
}


def ways(kernel: str, launch: Launch) -> set[str]:
    """Which ways of its engine a launch took; none of a kernel that has only one."""
    return KERNELS[kernel][0](launch) if kernel in KERNELS else set()


@functools.cache
def _symbols(library: str) -> dict[int, str]:
    command = ["nm", "-C", "--defined-only", library]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    found = (line.split(" ", 2) for line in lines.splitlines())
    return {int(where, 16): name for where, kind, name in found if kind in "tTwW"}


def name_of(launch: Launch) -> str:
    """``rowwise_kernel<F<float>>`` of ``void apex::emu::rowwise_kernel<apex::F<float> >(...)``."""
    return ptxas.shorten(_symbols(launch.library).get(launch.offset, ""))


def kernel_of(launch: Launch) -> str:
    """``rowwise_kernel`` of ``rowwise_kernel<...>``."""
    return name_of(launch).partition("<")[0]


def op_of(library: str) -> str:
    """Of a library in the cache, whose folder is called package-op-digest."""
    return Path(library).parent.name.split("-")[-2]


def read_notes(folder: Path) -> dict[str, dict[str, set[str]]]:
    """Return, for each op and each of its kernels, the ways that were compared."""
    found: dict = defaultdict(lambda: defaultdict(set))
    for file in sorted(folder.glob("*.json")):
        notes = json.loads(file.read_text())
        for line in [*notes["compared"], *notes["launched"]]:
            launch = Launch.parse(line)
            kernel = kernel_of(launch)
            taken = found[op_of(launch.library)][kernel]
            if line in notes["compared"]:
                taken |= ways(kernel, launch)
    return found


def missing_ways(found: dict[str, dict[str, set[str]]], ops: list[str]) -> list[tuple]:
    """Return (op, kernel, ways) where no row was compared; (op, "", {}) where nothing ran."""
    missing = []
    for op in ops:
        if not found.get(op):
            missing.append((op, "", frozenset()))
        for kernel, taken in sorted(found.get(op, {}).items()):
            lacks = KERNELS[kernel][1] - taken if kernel in KERNELS else set()
            if lacks:
                missing.append((op, kernel, frozenset(lacks)))
    return missing


def accepted_ways(file: Path = ACCEPTED) -> dict[tuple[str, str], set[str]]:
    """Return the ways that may be missing, by op and kernel; each entry has its reason."""
    accepted: dict = defaultdict(set)
    for entry in tomllib.loads(file.read_text()).get("accepted", []):
        if not entry.get("reason"):
            raise ValueError(f"{file.name}: {entry} has no reason")
        for op in entry["ops"]:
            accepted[op, entry.get("kernel", "")] |= set(entry.get("ways", []))
    return accepted


def report(folder: Path, ops: list[str], file: Path = ACCEPTED) -> list[str]:
    """Print the compared ways of each op; return what is wrong, a sentence each."""
    found, accepted = read_notes(folder), accepted_ways(file)
    for op in ops:
        for kernel, taken in sorted(found.get(op, {}).items()):
            if kernel in KERNELS:
                print(f"{op}: {kernel}: {', '.join(sorted(taken)) or 'nothing was compared'}")
    wrong, needed = [], defaultdict(set)
    for op, kernel, lacks in missing_ways(found, ops):
        known = accepted.get((op, kernel))
        needed[op, kernel] |= lacks
        if not kernel and known is None:
            wrong.append(f"{op}: no test of it ran a kernel that the emulator saw")
        elif lacks - (known or set()):
            named = ", ".join(sorted(lacks - (known or set())))
            wrong.append(f"{op}: {kernel}: no compared row took: {named}")
    for (op, kernel), names in accepted.items():
        is_stale = (op, kernel) not in needed or names - needed[op, kernel]
        if op in ops and is_stale:
            named = ", ".join(sorted(names - needed[op, kernel])) or "all"
            wrong.append(f"{op}: {kernel}: {file.name} accepts what was compared: {named}")
    return wrong


# What follows is the plugin.


class Notes:
    """What this process launched; a launch of a passed test that compared numbers counts."""

    def __init__(self, folder: Path):
        name = f"{os.environ.get('APEX_EMULATE', '')}-{os.getpid()}"
        self.trace = folder / f"{name}.trace"
        self.file = folder / f"{name}.json"
        self.read = 0
        self.has_compared = False
        self.launched: set[str] = set()
        self.compared: set[str] = set()
        os.environ[TRACE] = str(self.trace)

    def new_lines(self) -> set[str]:
        if not self.trace.exists():
            return set()
        with self.trace.open() as file:
            file.seek(self.read)
            lines = set(file)
            self.read = file.tell()
        return lines

    def watch(self, module, name: str) -> None:
        comparison = getattr(module, name)

        @functools.wraps(comparison)
        def compare(*arguments, **options):
            before = self.has_compared
            result = comparison(*arguments, **options)
            self.has_compared = before if name == WITH_ITSELF else True
            return result

        setattr(module, name, compare)

    def end_test(self, has_passed: bool) -> None:
        lines = self.new_lines()
        self.launched |= lines
        if has_passed and self.has_compared:
            self.compared |= lines
        self.has_compared = False

    def write(self) -> None:
        notes = {"compared": sorted(self.compared), "launched": sorted(self.launched)}
        self.file.write_text(json.dumps(notes))
        self.trace.unlink(missing_ok=True)


def pytest_configure(config):
    if not os.environ.get(FOLDER):
        return
    import torch

    import apex_testkit

    notes = Notes(Path(os.environ[FOLDER]))
    for module in (apex_testkit, apex_testkit.accuracy, torch.testing, torch):
        for name in (*COMPARISONS, WITH_ITSELF):
            if hasattr(module, name):
                notes.watch(module, name)
    config.pluginmanager.register(NotesPlugin(notes))


class NotesPlugin:
    def __init__(self, notes: Notes):
        self.notes = notes

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "call":
            self.notes.end_test(report.passed)
        return report

    def pytest_sessionfinish(self):
        self.notes.write()
