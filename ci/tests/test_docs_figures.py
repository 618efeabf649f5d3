"""Figures of the site against the records, computed here from the csv text."""

import csv
import re
import shutil
import statistics
import subprocess

import pytest

from ci import docs_figures
from ci.workspace import ROOT

RECORDS = ROOT / "docs" / "benchmarks"
GPUS = [f for f in sorted(RECORDS.glob("*.csv")) if f.with_suffix(".md").is_file()]
FRONT = (ROOT / "docs" / "index.md").read_text()
TRAINING = "benchmarks/training.csv"


def rows(file):
    with file.open(newline="") as text:
        return list(csv.DictReader(text))


def fastest(found):
    """From each (op, case) to ours and the fastest peer, by the times themselves."""
    result = {}
    for row in found:
        name = row["contestant"]
        if name in ("products", "alone") or name.startswith("apex_"):
            continue
        side = 0 if name == "apex" else 1
        pair = result.setdefault((row["op"], row["case"]), [None, None])
        if pair[side] is None or float(row["median_us"]) < float(pair[side]["median_us"]):
            pair[side] = row
    return {key: pair for key, pair in result.items() if all(pair)}


def ratio(ours, peer):
    return float(peer["median_us"]) / float(ours["median_us"])


@pytest.fixture
def page(request, tmp_path):
    shutil.copy(request.param.with_suffix(".md"), tmp_path)
    made = tmp_path / request.param.with_suffix(".md").name
    docs_figures.gpu_page(request.param, made)
    return made


@pytest.mark.parametrize(
    ("file", "page"), [(f, f) for f in GPUS], ids=[f.stem for f in GPUS], indirect=["page"]
)
def test_a_gpus_page_begins_with_its_summary(file, page):
    text = page.read_text()
    summary, _, rest = text.partition("\n## All cases\n")
    assert summary.count("\n## ") == 1
    table = re.findall(
        r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (\d+) of (\d+) \|", summary, re.M
    )
    expected = {}
    for (op, _), pair in fastest(rows(file)).items():
        expected.setdefault(op, []).append(ratio(*pair))
    assert [op for op, *_ in table] == sorted(expected)
    for op, middle, best, worst, lost, count in table:
        ratios = expected[op]
        values = statistics.median(ratios), max(ratios), min(ratios)
        assert [middle, best, worst] == [f"{value:.2f}" for value in values]
        assert (int(lost), int(count)) == (sum(r < 1 for r in ratios), len(ratios))
    assert page.with_suffix(".svg").stat().st_size > 1000
    # Every row of the committed page is there, with or without a dagger.
    old = [line for line in file.with_suffix(".md").read_text().splitlines() if line[:2] == "| "]
    new = {line.replace(" † |", " |") for line in rest.splitlines()}
    assert set(old) - {"| step | verdict | seconds |"} <= new


def test_rows_older_than_the_engines_are_marked(monkeypatch, tmp_path):
    monkeypatch.setattr(docs_figures, "changes_since", {"old": 3, "new": 0}.get)
    keys = ["op", "case", "contestant", "device", "threads", "malloc", "median_us", "ratio"]
    keys += ["copy_fraction", "copy_gb_per_s", "processor", "torch", "commit"]
    lines = [
        ["norm", "small", "apex", "cuda", 1, "stock", 2.0, 1.0, 0.5, 9.0, "Card", "2", "old"],
        ["norm", "small", "torch", "cuda", 1, "stock", 1.0, 0.5, 0.5, 9.0, "Card", "2", "old"],
        ["norm", "large", "apex", "cuda", 1, "stock", 2.0, 1.0, 0.5, 9.0, "Card", "2", "new"],
        ["norm", "large", "torch", "cuda", 1, "stock", 6.0, 3.0, 0.5, 9.0, "Card", "2", "new"],
    ]
    record, page = tmp_path / "card.csv", tmp_path / "card.md"
    with record.open("w", newline="") as file:
        csv.writer(file).writerows([keys, *lines])
    table = docs_figures.markdown(docs_figures.read_records(record))
    page.write_text(f"# Card\n\nVersions.\n\nText.\n\n{table}\n\n| step | verdict |\n|---|---|\n")
    docs_figures.gpu_page(record, page)
    text = page.read_text()
    assert "| norm † | small | 2.0 |" in text
    assert "| norm | large | 2.0 |" in text
    assert "3 commits changed the engines of GPU kernels" in text
    assert "1 of 2 cases are stale" in text
    assert "| norm | 1.75 | 3.00 | 0.50 | 1 of 2 |  | small (torch) |" in text
    page.write_text("# Card\n\nVersions.\n\nText.\n")
    with pytest.raises(ValueError, match=r"card\.md: does not have the table of card\.csv"):
        docs_figures.gpu_page(record, page)


def git(*words):
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else None


def test_age_is_that_of_git():
    if git("rev-parse", "--is-shallow-repository") != ["false"]:
        pytest.skip("a shallow clone: there is no history to ask")
    head, *older = git("rev-list", "-n", "300", "HEAD")
    assert docs_figures.changes_since(head + "+") == 0
    changed = git("diff", "--name-only", older[-1], "HEAD", "--", "shared_csrc/include/apex/engine")
    if any(file.endswith("_gpu.h") for file in changed):
        assert docs_figures.changes_since(older[-1]) > 0
    assert docs_figures.changes_since("0" * 12) is None
    assert docs_figures.day("0" * 12) == "commit 000000000000"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", docs_figures.day(head))


def test_figures_of_the_front_are_those_of_the_records(tmp_path):
    links = [link for link in docs_figures.FIGURE.findall(FRONT) if link[2] != TRAINING]
    assert len(links) == 6
    (tmp_path / "index.md").write_text(FRONT)
    docs_figures.fill(tmp_path)
    text = (tmp_path / "index.md").read_text()
    assert "[Figure" not in text
    assert "[Machine" not in text
    assert "](figures.svg)" in text
    assert (tmp_path / "figures.svg").stat().st_size > 1000
    shown = re.findall(r"\*\*([\d.]+)\*\* \(([\d.]+) (ms|us); (\w+) ([\d.]+) (ms|us); ", text)
    machines = set()
    for (op, case, link), figure in zip(links, shown, strict=True):
        found = rows(ROOT / "docs" / link)
        gpu = found[0]["device"] == "cuda"
        found = [r for r in found if gpu or (r["threads"], r["malloc"]) == ("2", "tuned")]
        ours, peer = fastest(found)[op, case]
        machines.add((gpu, ours["processor"], ours["torch"]))
        value, time, unit, name, other, other_unit = figure
        assert (value, name) == (f"{ratio(ours, peer):.2f}", peer["contestant"])
        for shown_time, shown_unit, row in ((time, unit, ours), (other, other_unit, peer)):
            us = float(shown_time) * {"ms": 1000, "us": 1}[shown_unit]
            assert us == pytest.approx(float(row["median_us"]), rel=0.02)
    # The table's head names one machine for each column.
    assert len(machines) == 2
    assert all(f"{processor}, " in text for _, processor, _ in machines)
    assert min(float(value) for value, *_ in shown) < 1, "a loss is among the figures"


def test_whole_trainings_of_the_front_are_those_of_the_record():
    links = [link for link in docs_figures.FIGURE.findall(FRONT) if link[2] == TRAINING]
    found = rows(ROOT / "docs" / TRAINING)
    pairs = fastest(found)
    assert [link[:2] for link in links] == list(pairs)
    assert len(pairs) == 4
    assert {r["device"] for r in found} == {"cpu"}  # of a GPU the table says "not measured yet"
    for op, case in pairs:
        text = docs_figures.filled(f"[Figure: {op}; {case}]({TRAINING})", ROOT / "docs/index.md")
        ours, peer = pairs[op, case]
        assert text.startswith(f"**{ratio(ours, peer):.2f}** (")
        for row in (ours, peer):
            per_s = int(row["work_per_step"]) * 1e6 / float(row["median_us"])
            mib = int(row["peak_bytes"]) / 2**20
            shown = f"{per_s:,.0f} {row['work']}/s, loss {float(row['loss']):.3f}, {mib:.0f} MiB"
            assert shown in text
        if (op, case) == ("training gpt", "float32"):  # another network's rounding is amplified
            assert float(ours["loss"]) == pytest.approx(float(peer["loss"]), rel=1e-3)


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("[Figure: adamw_step; resnet51](benchmarks/fused_adam.csv)", "no case 'resnet51'"),
        ("[Figure: adamw_step; resnet50](benchmarks/nothing.csv)", "is no record"),
    ],
)
def test_a_figure_without_a_record_is_an_error(link, reason, tmp_path):
    (tmp_path / "page.md").write_text(link)
    with pytest.raises(ValueError, match=reason):
        docs_figures.fill(tmp_path)
