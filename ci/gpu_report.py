"""What ci/gpu.py leaves: a csv file and a Markdown page named after the card, and a summary."""

import platform
import re
import time
from collections import Counter
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent


def records_file(out: Path) -> Path:
    """Where the benchmarks append their records while they run."""
    return out / "gpu.partial.csv"


def write(device: str, out: Path, results: list[dict]) -> list[dict]:
    """Write ``<card>.csv`` and ``<card>.md`` to ``out``; return the benchmark records."""
    from apex_testkit import bench_report

    machine = facts(device)
    name = re.sub(r"[^a-z0-9]+", "-", machine["card"].lower()).strip("-")
    # Paths of this machine say nothing to others.
    steps = [r | {"detail": r["detail"].replace(str(ROOT), ".")} for r in results]
    file = out / f"{name}.csv"
    file.unlink(missing_ok=True)
    if records_file(out).is_file():
        records_file(out).rename(file)
    records = bench_report.read_records(file) if file.is_file() else []
    (out / f"{name}.md").write_text(page(machine, steps, records))
    return records


def facts(device: str) -> dict[str, str | None]:
    import torch

    from apex_testkit.bench_report import machine_facts

    machine = machine_facts(device)
    return {
        "card": machine["processor"] if device == "cuda" else f"rehearsal {platform.machine()} cpu",
        "torch": machine["torch"],
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "python": machine["python"],
        "commit": machine["commit"],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def page(machine: dict, steps: list[dict], records: list[dict]) -> str:
    """Return the page for readers: machine, benchmarks, and how each step ended."""
    from apex_testkit.bench_report import markdown

    versions = [f"{k} {v}" for k, v in machine.items() if v and k not in ("card", "date")]
    lines = [f"# {machine['card']}", "", f"{', '.join(versions)}; {machine['date']}."]
    lines += ["`python ci/gpu.py` repeats it.", ""]
    bandwidths = [r["copy_gb_per_s"] for r in records if r["copy_gb_per_s"]]
    if bandwidths:
        lines += [
            f"Copy bandwidth, the median over benchmarks: {median(bandwidths):.0f} GB/s, reads and "
            "writes counted.",
            "",
            "Times are of one call on cold caches, replayed from a CUDA graph (~: launched from "
            "Python, because a contestant cannot be captured). Bytes count each input read once "
            "and each output written once. In brackets is the ratio of calls in a loop, launches "
            "and Python included.",
            "",
            markdown(records),
            "",
        ]
    lines += ["| step | verdict | seconds |", "|---|---|---:|"]
    lines += [f"| {s['name']} | {s['status']} | {s['seconds']:.0f} |" for s in steps]
    for step in steps:
        if step["detail"]:
            lines += ["", f"{step['name']}:", "", "```text", step["detail"].strip("\n"), "```"]
    return "\n".join(lines) + "\n"


def summary(results: list, records: int, seconds: float) -> str:
    """Return the last lines of the output: every step's verdict, then the counts."""
    counts = Counter(r.status for r in results)
    total = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    lines = [f"{r.status:<10} {r.name:<32} {r.seconds:6.0f} s" for r in results]
    return "\n".join(["", *lines, f"{total}; {records} figures; {seconds:.0f} s in all"])
