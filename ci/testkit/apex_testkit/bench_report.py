"""Benchmark records as a table, a plot, and the facts of the machine they were taken on."""

import argparse
import ast
import csv
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from statistics import median

import torch

# Of a record, what is no number; the rest is written as Python writes it, and None as nothing.
_TEXTS = ["op", "case", "contestant", "device", "processor", "torch", "python", "commit", "malloc"]
_TEXTS += ["work"]  # of a training: tokens or pictures
_CASE = ("op", "case", "contestant", "device", "threads", "malloc")
_MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


@cache
def machine_facts(device: str = "cpu") -> dict:
    """Return what a figure means nothing without: processor, threads, torch, commit, malloc."""
    return {
        "processor": _gpu_name(device) or _cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
        "malloc": "tuned" if all(v in os.environ for v in _MALLOC_VARIABLES) else "stock",
    }


def _gpu_name(device: str) -> str | None:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit of the checkout, with a ``+`` if files differ; None outside of one."""
    folder = Path(__file__).parent

    def git(*args):
        command = ["git", "-C", str(folder), *args]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout

    try:
        commit = git("rev-parse", "--short=12", "HEAD").strip()
        return commit + ("+" if git("status", "--porcelain").strip() else "")
    except (OSError, subprocess.SubprocessError):
        return None


def format_row(record: dict) -> str:
    """Return one line: op, case, contestant, time, spread, bandwidth, ratio, load."""
    spread = (record["high_us"] - record["low_us"]) / record["median_us"] / 2
    parts = [
        f"{record['op']:<18} {record['case']:<26} {record['contestant']:<14}",
        f"{record['median_us']:>11.1f} us ±{spread:>4.0%}",
        f"{record['gb_per_s']:>7.1f} GB/s" if record["gb_per_s"] else " " * 12,
        f"{record['copy_fraction']:>5.2f} of copy" if record["copy_fraction"] else " " * 13,
        f"{record['ratio']:>7.2f}x" if record["ratio"] else " " * 8,
    ]
    if record.get("loop_us"):
        times = f"{record['loop_ratio']:.2f}x" if record["loop_ratio"] else ""
        parts.append(f"in a loop {record['loop_us']:>9.1f} us {times:>7}")
    if record["is_noisy"]:
        taken = record["others_cores"] + record["steal_cores"]
        parts.append(f"  ! others took {taken:.2f} of a core")
    return "  ".join(parts).rstrip()


def append_records(path: Path, records: list[dict]) -> None:
    """Append records of the same keys to a csv file, a line each, below a line of the keys."""
    is_new = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(records)


def read_records(path: Path) -> list[dict]:
    """Read a file that ``compare`` appended to; a case measured again replaces the earlier one."""
    latest: dict[tuple, dict] = {}
    with path.open(newline="") as file:
        lines = csv.reader(file)
        keys = next(lines, _CASE)
        try:
            keys_of_case = [keys.index(key) for key in _CASE]
            for cells in lines:
                record = {k: _value(k, c) for k, c in zip(keys, cells, strict=True)}
                latest[tuple(cells[i] for i in keys_of_case)] = record
        except (SyntaxError, ValueError) as error:
            at = f"{path}, line {lines.line_num}"
            raise ValueError(f"{at}: no benchmark record ({error!r})") from error
    return list(latest.values())


def _value(key: str, cell: str) -> object:
    return (cell if key in _TEXTS else ast.literal_eval(cell)) if cell else None


def table(records: list[dict]) -> str:
    """Return the records as text, with the machine above each group of rows taken on it."""
    lines, shown = [], None
    for record in records:
        machine = (
            f"{record['processor']}, {record['threads']} threads, torch {record['torch']}, "
            f"{record['malloc']} malloc, commit {record['commit'] or 'unknown'}"
        )
        if machine != shown:
            lines.append(f"# {machine}")
            shown = machine
        lines.append(format_row(record))
    return "\n".join(lines)


def markdown(records: list[dict]) -> str:
    """Return records as a Markdown table, a row per case: ours, and times of the peers.

    Times in a loop are there for GPUs, where a ``~`` marks times of calls that are launched from
    Python. A case that no attempt measured quietly has a ``!``.
    """
    cases: dict[tuple, list[dict]] = {}
    for record in records:
        cases.setdefault((record["op"], record["case"]), []).append(record)
    loop = " (in a loop)" if any(r.get("loop_ratio") for r in records) else ""
    lines = [
        f"| op | case | apex, us | of copy bandwidth | peers' time / ours{loop} |",
        "|---|---|---:|---:|---|",
    ]
    for (op, case), rows in cases.items():
        ours = next((r for r in rows if r["contestant"] == "apex"), None)
        peers = ", ".join(_peer(r) for r in rows if r["contestant"] != "apex")
        fraction = f"{ours['copy_fraction']:.0%}" if ours and ours["copy_fraction"] else ""
        time_us = f"{ours['median_us']:.1f}" if ours else ""
        time_us += f" ({trained(ours)})" if ours and ours.get("work") else ""
        time_us += " ~" if any(r.get("is_replayed") is False for r in rows) else ""
        time_us += " !" if any(r.get("is_noisy") for r in rows) else ""
        lines.append(f"| {op} | {case} | {time_us} | {fraction} | {peers} |")
    return "\n".join(lines)


def _peer(record: dict) -> str:
    if not record["ratio"]:
        return f"{record['contestant']} {record['median_us']:.1f} us"
    loop = f" ({record['loop_ratio']:.2f})" if record.get("loop_ratio") else ""
    training = f" ({trained(record)})" if record.get("work") else ""
    return f"{record['contestant']} {record['ratio']:.2f}{loop}{training}"


def trained(record: dict) -> str:
    """Return a training's speed, loss and peak memory."""
    per_s = record["work_per_step"] / record["median_us"] * 1e6
    text = f"{per_s:,.0f} {record['work']}/s, loss {record['loss']:.3f}"
    peak = record["peak_bytes"]
    return f"{text}, {peak / 2**20:.0f} MiB" if peak else text


def plot(records: list[dict], target: Path) -> None:
    """Draw every peer's time relative to ours, a bar each, to a PNG or SVG file.

    Raises:
        ValueError: no record is of a peer beside ``apex``.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = [r for r in records if r["ratio"] and r["contestant"] != "apex"]
    if not records:
        raise ValueError("plot: no record of a peer beside apex, nothing to draw")
    labels = [f"{r['op']}, {r['case']}\n{r['contestant']}" for r in records]
    ratios = [r["ratio"] for r in records]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.42 * len(records)), layout="constrained")
    colors = ["tab:green" if ratio >= 1 else "tab:red" for ratio in ratios]
    bars = axes.barh(range(len(records)), ratios, color=colors)
    axes.bar_label(bars, labels=[f" {ratio:.2f}" for ratio in ratios], fontsize=8)
    axes.set_yticks(range(len(records)), labels, fontsize=8)
    axes.set_ylim(len(records) - 0.4, -0.6)
    _ratio_axis(axes)
    axes.set_xlabel("time of the peer / time of apex (above 1 apex is faster)")
    first = records[0]
    axes.set_title(
        f"{first['processor']}, {first['threads']} threads, torch {first['torch']}, "
        f"{first['malloc']} malloc",
        fontsize=9,
    )
    figure.savefig(target, dpi=150)
    pyplot.close(figure)


def _ratio_axis(axes) -> None:
    """Make the x axis logarithmic, with labels that do not overlap, and mark 1."""
    from matplotlib import ticker

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.axvline(1.0, color="black", linewidth=0.8)


def plot_ranges(machines: dict[str, dict[str, list[float]]], target: Path) -> None:
    """Draw ratios of each machine: a line from a name's worst to its best, a dot at the median.

    Args:
        machines: from a machine to the ratios of each name, peer's time / ours.
        target: a PNG or SVG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "apex"  # the same file from the same ratios
    of_all: dict[str, list[float]] = {}
    for groups in machines.values():
        for name, ratios in groups.items():
            of_all.setdefault(name, []).extend(ratios)
    names = sorted(of_all, key=lambda name: median(of_all[name]))
    step = 0.22 * len(machines)
    figure, axes = pyplot.subplots(figsize=(7.5, 1.2 + step * len(names)), layout="constrained")
    for number, (machine, groups) in enumerate(machines.items()):
        offset = (number - (len(machines) - 1) / 2) * 0.3
        rows = [(names.index(name) - offset, ratios) for name, ratios in groups.items()]
        color = ("tab:blue", "tab:orange", "tab:green", "tab:purple")[number % 4]
        axes.hlines(*zip(*((y, min(r), max(r)) for y, r in rows), strict=True), color=color)
        points = [(median(r), y) for y, r in rows]
        axes.plot(*zip(*points, strict=True), "o", color=color, label=machine)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(-0.7, len(names) - 0.3)
    _ratio_axis(axes)
    axes.grid(linewidth=0.3)
    axes.set_xlabel("time of the fastest peer / time of apex (above 1 apex is faster)")
    figure.legend(loc="outside upper left", fontsize=9, frameon=False)
    figure.savefig(target, dpi=150, metadata={"Date": None} if target.suffix == ".svg" else None)
    pyplot.close(figure)


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m apex_testkit.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("table", "print the records"), ("plot", "draw the ratios")):
        command = commands.add_parser(name, help=text)
        command.add_argument("source", type=Path, help="file that APEX_BENCH_RECORDS named")
    commands.choices["plot"].add_argument("target", type=Path, help="PNG or SVG file to write")
    options = parser.parse_args(arguments)
    records = read_records(options.source)
    if options.command == "table":
        print(table(records))
    else:
        plot(records, options.target)
    return 0
