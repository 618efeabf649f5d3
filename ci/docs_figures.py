"""Figures on pages of the site, made of the records in docs/benchmarks when it is built.

On a code host a figure is a link to its record, "[Figure: adamw_step; resnet50](fused_adam.csv)";
on the site the measured times stand in its place. The page of a GPU gets a summary by operation.

A ratio is the time of the fastest peer divided by ours: above 1 we are faster than every peer.
"""

import functools
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from apex_testkit.bench_report import markdown, read_records, trained
from ci import dirty
from ci.workspace import ROOT

RECORDS = ROOT / "docs" / "benchmarks"
FIGURE = re.compile(r"\[Figure: ([^;\]]+); ([^\]]+)\]\(([^)]+\.csv)\)")
OVERVIEW = "<!-- overview -->"
MACHINE = re.compile(r"\[Machine\]\(([^)]+\.csv)\)")
# What GPU kernels of all ops are made of; a record of before its last change is stale.
ENGINES = [f"shared_csrc/include/apex/{folder}" for folder in ("engine", "core")]
GPU_ENGINES = [*ENGINES, ":(exclude)*_cpu.h"]
ABOUT_OVERVIEW = "Ratios of the benchmarks: the worst, the median and the best case of each"
# Contestants that do less than the op does: a bound, not a peer.
BOUNDS = {"products", "alone"}


@dataclass(frozen=True)
class Case:
    """One case of an operation: our record, and that of the fastest peer."""

    ours: dict
    peer: dict
    loop_ratio: float | None  # of calls in a loop, the smallest of all peers

    @property
    def ratio(self) -> float:
        return self.peer["ratio"]


def fill(pages: Path) -> None:
    """Put figures and machines in the place of links, and a picture in that of a comment."""
    overview_picture(pages / "figures.svg")
    for page in pages.rglob("*.md"):
        text = page.read_text()
        new = filled(text, page)
        if new != text:
            page.write_text(new)


def filled(text: str, page: Path) -> str:
    text = FIGURE.sub(lambda match: figure(page, *match.groups()), text)
    text = MACHINE.sub(lambda match: machine(main_records(record_file(page, match[1]))), text)
    return text.replace(OVERVIEW, f"![{ABOUT_OVERVIEW}](figures.svg)")


def record_file(page: Path, link: str) -> Path:
    file = RECORDS / Path(link).name
    if not file.is_file():
        raise ValueError(f"{page.name}: {link} is no record of docs/benchmarks")
    return file


def figure(page: Path, op: str, case: str, link: str) -> str:
    """Return a ratio, both times, and the day."""
    found = cases(main_records(record_file(page, link)))
    chosen = next((c for c in found if (c.ours["op"], c.ours["case"]) == (op, case)), None)
    if chosen is None:
        raise ValueError(f"{page.name}: {link} has no case {case!r} of {op!r} with a peer")
    times = f"{time_text(chosen.ours)}; {chosen.peer['contestant']} {time_text(chosen.peer)}"
    return f"**{chosen.ratio:.2f}** ({times}; {day(chosen.ours['commit'])})"


def time_text(record: dict) -> str:
    if record.get("work"):
        return trained(record)
    us = record["median_us"]
    return f"{us / 1000:.2f} ms" if us >= 1000 else f"{us:.0f} us"


def machine(records: list[dict]) -> str:
    first = records[0]
    count = first["threads"]
    threads = f", {count} thread{'s' * (count > 1)}" if first["device"] == "cpu" else ""
    return f"{first['processor']}{threads}, torch {first['torch']}"


def main_records(file: Path) -> list[dict]:
    """Return the records that compare kernels alone: most threads, and a tuned malloc on CPUs."""
    records = read_records(file)
    most = max(r["threads"] for r in records)
    return [
        r
        for r in records
        if r["threads"] == most and (r["device"] != "cpu" or r["malloc"] == "tuned")
    ]


def cases(records: list[dict]) -> list[Case]:
    """Return the cases that have a peer, in the order of the records."""
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault((record["op"], record["case"]), []).append(record)
    return [case for rows in groups.values() if (case := one_case(rows))]


def one_case(rows: list[dict]) -> Case | None:
    ours = next((r for r in rows if r["contestant"] == "apex"), None)
    peers = [r for r in rows if r["ratio"] and is_peer(r["contestant"])]
    if ours is None or not peers:
        return None
    loops = [r["loop_ratio"] for r in peers if r.get("loop_ratio")]
    return Case(ours, min(peers, key=lambda r: r["ratio"]), min(loops, default=None))


def is_peer(contestant: str) -> bool:
    return not contestant.startswith("apex") and contestant not in BOUNDS


@functools.cache
def day(commit: str) -> str:
    """Return the day of the commit that was measured, or its name where git has no history."""
    name = commit.removesuffix("+")
    try:
        return dirty.git(ROOT, "show", "-s", "--format=%cs", name)
    except (OSError, subprocess.CalledProcessError):
        return f"commit {name}"


@functools.cache
def changes_since(commit: str) -> int | None:
    """Count the later commits that changed an engine of GPUs; None where git has no history."""
    name = commit.removesuffix("+")
    try:
        listing = ["rev-list", "--count", f"{name}..HEAD", "--", *GPU_ENGINES]
        return int(dirty.git(ROOT, *listing))
    except (OSError, subprocess.CalledProcessError):
        return None


def gpu_page(record: Path, page: Path) -> None:
    """Put a summary before the table of a GPU's page, and mark the stale rows of both.

    Raises:
        ValueError: the page does not have the table of its record.
    """
    from apex_testkit.bench_report import plot_ranges

    records = read_records(record)
    text, table = page.read_text(), markdown(records)
    if text.count(table) != 1:
        raise ValueError(f"{page.name}: does not have the table of {record.name}")
    found = cases(records)
    stale = {(r["op"], r["case"]) for r in records if changes_since(r["commit"])}
    title, versions, rest = text.split("\n\n", 2)
    rest = rest.replace(table, f"{marked(table, stale)}\n\n## How each step ended")
    picture = page.with_suffix(".svg")
    groups = {op: [c.ratio for c in own] for op, own in by_op(found).items()}
    plot_ranges({machine(records): groups}, picture)
    parts = [
        *(title, versions, "## Summary by operation", age(records, stale)),
        "The ratio is the fastest peer's time divided by ours: above 1 we are faster than every "
        "peer. The best, the median and the worst are over the cases of an operation.",
        summary(found),
        f"![Ratios of each operation: worst, median and best case]({picture.name})",
        *("## All cases", rest),
    ]
    page.write_text("\n\n".join(parts))


def age(records: list[dict], stale: set[tuple]) -> str:
    """Return whether the figures are those of today's kernels."""
    commits = {r["commit"] for r in records}
    if any(changes_since(commit) is None for commit in commits):
        names = ", ".join(sorted(commits))
        return f"Measured at {names}; without the repository's history, stale rows are not marked."
    if not stale:
        return "No engine has changed since these figures were taken."
    every = {(r["op"], r["case"]) for r in records}
    counts = max(changes_since(commit) or 0 for commit in commits)
    return (
        '!!! warning "These figures are older than the kernels"\n\n'
        f"    Since they were taken, {counts} commits changed the engines of GPU kernels. "
        f"{len(stale)} of {len(every)} cases are stale (†): today's may be faster or slower."
    )


def marked(table: str, stale: set[tuple]) -> str:
    """Return a table of cases with a dagger at each stale one."""
    lines = []
    for line in table.splitlines():
        op, case = [cell.strip() for cell in line.split("|")[1:3]]
        lines.append(line.replace(f"| {op} |", f"| {op} † |", 1) if (op, case) in stale else line)
    return "\n".join(lines)


def by_op(found: list[Case]) -> dict[str, list[Case]]:
    result: dict[str, list[Case]] = {}
    for case in found:
        result.setdefault(case.ours["op"], []).append(case)
    return dict(sorted(result.items()))


def summary(found: list[Case]) -> str:
    """Return a table with a row for each operation."""
    lines = [
        "| op | median | best | worst | slower in | median in a loop | worst case |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for op, own in by_op(found).items():
        ratios = [case.ratio for case in own]
        loops = [case.loop_ratio for case in own if case.loop_ratio]
        worst = min(own, key=lambda case: case.ratio)
        lost = sum(ratio < 1 for ratio in ratios)
        cells = [op, *(f"{f(ratios):.2f}" for f in (median, max, min)), f"{lost} of {len(own)}"]
        cells.append(f"{median(loops):.2f}" if loops else "")
        cells.append(f"{worst.ours['case']} ({worst.peer['contestant']})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def overview_picture(target: Path) -> None:
    """Draw the ratios of the benchmarks that were taken on a CPU and on each GPU."""
    from apex_testkit.bench_report import plot_ranges

    files = sorted(RECORDS.glob("[!.]*.csv"))
    gpus = [file for file in files if read_records(file)[0]["device"] != "cpu"]
    ours = {file.stem: cases(main_records(file)) for file in files if file not in gpus}
    homes: dict[str, str] = {}  # of operations; layer_norm rather than norm_sizes
    for name, found in ours.items():
        for op in by_op(found):
            if op not in homes or op.startswith(name):
                homes[op] = name
    machines = {}
    for file in gpus:
        groups: dict[str, list[float]] = {}
        for case in cases(read_records(file)):
            if case.ours["op"] in homes:
                groups.setdefault(homes[case.ours["op"]], []).append(case.ratio)
        machines[machine(read_records(file))] = groups
    shown = {name for groups in machines.values() for name in groups}
    cpu = {name: [c.ratio for c in found] for name, found in ours.items() if name in shown}
    first = next(file for file in files if file not in gpus)
    plot_ranges({machine(main_records(first)): cpu, **machines}, target)
