"""What the model predicts of an H100, beside what one measured: docs/benchmarks/gpu-model.md.

python ci/cost_model.py, where there is torch

The model: 2.6 us for a CUDA graph and for each launch, and bytes at the speed of a copy, less where
a kernel has fewer KiB under way. Launches, and how often bytes move, are of ci/gpu_costs.toml;
sizes and times are records of a lent card.
"""

import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ci" / "testkit")]

from apex_testkit.bench_report import read_records  # noqa: E402
from ci.costs import Table, launches_of, predicted_us  # noqa: E402

RECORDS = ROOT / "docs" / "benchmarks" / "nvidia-h100-80gb-hbm3.csv"
PAGE = ROOT / "docs" / "benchmarks" / "gpu-model.md"
TORCH = ("torch", "torch_batch_norm", "torch_total_norm")
# Records that count what is read twice as twice, so that the factor is in their bytes.
COUNTS_REREADS = ("sync_batch_norm", "groupbn", "group_norm")
# Of lists of tensors: the case that has as many launches, or as few.
LISTS = {"10,000 x 100": "10000 of 1", "32 x 1M": "float32 1 of 64"}
WORST = 5
# Of an operation, why the model may be far off.
REASONS = {
    "transducer_loss": "A sample's frames depend on each other: 160 steps in a row, which the "
    "model has no term for.",
    "rotary_embedding": "The record is of an engine whose loads waited for each other.",
    "index_mul_2d": "Rows of 16 or indices that repeat: atomics in torch; ours is the record of "
    "an engine that sorted in more launches.",
    "focal_loss": "Bound by instructions (71 an element), not by memory.",
    "group_norm": "One thread walked a group's channels in the record's engine; torch's moments "
    "take a block a group, 32 of 132 SMs.",
    "layer_norm": "Blocks that read a row three times, and few of them, in the record's engine.",
    "scaled_softmax": "Bound by instructions: exponentials, and 16-bit loads in torch.",
    "fused_bias_swiglu": "Bound by instructions: divisions.",
    "sync_batch_norm": "Torch's batch norm of 16-bit planes converts them first.",
    "l2norm": "Thousands of addresses go with the launches, as parameters.",
    "unscale": "Its wide kernel is the record's, its share of the copy's speed today's.",
}


@dataclass
class Compared:
    """A record beside what the model says of it."""

    op: str
    case: str
    launches: int
    predicted_us: float
    measured_us: float

    @property
    def error(self) -> float:
        return self.predicted_us / self.measured_us - 1


def compared(table: Table, records: list[dict], contestants: tuple[str, ...]) -> list[Compared]:
    """Return the records of the contestants that the table has a call for, in their order."""
    found = []
    for record in records:
        is_wanted = record["contestant"] in contestants and record["is_replayed"]
        parts = parts_of(table, record) if is_wanted and record["bytes_moved"] else []
        is_torch = record["contestant"] in TORCH
        if not parts or (is_torch and any("torch_launches" not in part for part in parts)):
            continue
        # The record's bytes are our operands', or what we move, of a case of another size.
        counted = "moved" if record["op"].startswith(COUNTS_REREADS) else "operands"
        scale = record["bytes_moved"] / max(1, sum(part[counted] for part in parts))
        if is_torch:
            launches = sum(part["torch_launches"] for part in parts)
            moved = sum(part["torch_moved"] for part in parts)
        else:
            launches = sum(launches_of(part) for part in parts)
            moved = sum(table.time_bytes(part) for part in parts)
        predicted, measured = predicted_us(launches, moved * scale), record["median_us"]
        found.append(Compared(record["op"], record["case"], launches, predicted, measured))
    return found


def parts_of(table: Table, record: dict) -> list[dict]:
    """Return the parts of the call that is nearest to a record; none where there is none."""
    op, _, passes = record["op"].partition(" fwd")
    words = record["case"].split()
    calls = [c for c in table.calls.values() if c["call"].startswith(op + " ")]
    if op == "group_norm":
        calls = [c for c in table.calls.values() if c["op"] == "group_norm_nhwc"]
    for wanted in (LISTS.get(record["case"], ""), *words):  # the layout and the dtype
        alike = [c for c in calls if wanted and wanted in c["call"]]
        calls = alike or calls
    if not calls:
        return []
    largest = max(calls, key=lambda call: call["operands"])["call"]
    parts = [c for c in calls if c["call"] == largest]
    has_backward = passes == "+bwd" or not record["op"].endswith(" fwd")
    return parts if has_backward else [c for c in parts if c["part"] != "backward"]


def median_error(rows: list[Compared]) -> float:
    return statistics.median(abs(row.error) for row in rows)


HEAD = """\
# The model of an H100

`ci/cost_model.py` wrote this page. Predicted are 2.6 us for a CUDA graph and for each launch in
it, and bytes at the speed of a copy (2,825 GB/s), or less where fewer than 36 KiB an SM are under
way. Launches, re-reads and bytes under way are of `ci/gpu_costs.toml` ([how they are
counted](../guides/gpu-costs.md)), torch's as that page says. Measured is the record of [an
H100](nvidia-h100-80gb-hbm3.md). Only calls that were replayed from a CUDA graph are compared: in
others Python is measured. **Our engines of rows, columns, segments and lists were rewritten after
the record**, so that the error of ours holds both the model's and the difference of two engines;
that of torch is the model's alone.
"""


def page(ours: list[Compared], torchs: list[Compared]) -> str:
    """Return the page: median errors, by operation too, and the worst records with reasons."""
    lines = [HEAD]
    for name, rows in (("ours", ours), ("torch", torchs)):
        lines.append(f"Median error of {name} over {len(rows)} records: {median_error(rows):.0%}.")
    lines += ["", "| operation | records | median error, ours | of torch |", "|---|---:|---:|---:|"]
    groups: dict[str, tuple[list, list]] = defaultdict(lambda: ([], []))
    for which, rows in enumerate((ours, torchs)):
        for row in rows:
            groups[row.op][which].append(row)
    for op, (own, of_torch) in sorted(groups.items()):
        errors = [f"{median_error(rows):.0%}" if rows else "" for rows in (own, of_torch)]
        lines.append(f"| {op} | {len(own)} | {' | '.join(errors)} |")
    for name, rows in (("ours", ours), ("torch", torchs)):
        lines += ["", f"## The worst of {name}", ""]
        lines += ["| record | launches | predicted, us | measured, us | why |"]
        lines += ["|---|---:|---:|---:|---|"]
        for row in sorted(rows, key=lambda row: -abs(row.error))[:WORST]:
            times = f"{row.predicted_us:.1f} | {row.measured_us:.1f}"
            why = next((why for op, why in REASONS.items() if row.op.startswith(op)), "?")
            lines.append(f"| {row.op} {row.case} | {row.launches} | {times} | {why} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    table, records = Table(), read_records(RECORDS)
    text = page(compared(table, records, ("apex",)), compared(table, records, TORCH))
    PAGE.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
