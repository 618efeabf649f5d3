"""Campaigns of variants, without a GPU: what is compiled, who wins, and a rehearsal."""

import json
import math
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from environments import ROOT

from ci import campaign, campaign_cases, campaign_measure, campaign_report, gpu
from ci.workspace import tomllib

LISTED = tomllib.loads(campaign.LIST.read_text())
EMULATED = campaign.Target("emu")


def listed(*variants, ops=("multi_tensor_l2norm",)):
    return {"engine": [{"name": "lists", "ops": list(ops), "variants": list(variants)}]}


def test_the_list_is_of_numbers_and_ops_that_there_are():
    variants = list(campaign.variants_of(LISTED))
    engines = {v.engine for v in variants if v.constants == {}}
    assert engines == {"rows", "columns", "lists", "segments"}
    assert len({v.folder for v in variants}) == len(variants)
    for op in {op for v in variants for op in v.ops}:
        for device in ("cpu", "cuda"):
            cases = list(campaign_cases.cases_of(op, device))
            assert len({case.name() for case in cases}) == len(cases) > 0
            assert {case.dtype for case in cases} == {"bfloat16", "float32"}


@pytest.mark.parametrize(
    ("variants", "ops", "message"),
    [
        ([{"kThreads": 1}], ["fused_adam"], r"has no kThreads; it has kStreamingStores, "),
        ([{"kForeachThreads": 256}], ["fused_adam"], "kForeachThreads is 256 already"),
        ([{"kStreamingStores": False}], ["fused_adam"], "kStreamingStores is false already"),
        ([{"kForeachPacks": 2}] * 2, ["fused_adam"], "listed twice"),
        ([{}], ["fused_adam"], "listed twice"),
        ([], ["adam"], "there is no op adam"),
    ],
)
def test_a_list_that_cannot_be_is_refused(variants, ops, message):
    with pytest.raises(campaign.CampaignError, match=f"lists: .*{message}"):
        list(campaign.variants_of(listed(*variants, ops=ops)))


def test_an_unknown_engine_is_refused():
    with pytest.raises(campaign.CampaignError, match="no engine row; expected some of rows, col"):
        campaign.main(["row"])


def test_a_variant_changes_its_numbers_alone(tmp_path):
    before = (campaign.toolchain.INCLUDE / campaign.SHAPES).read_text()
    assert before.count("inline constexpr") == len(campaign.numbers())
    _, variant = campaign.variants_of(listed({"kForeachThreads": 128, "kStreamingStores": True}))
    folder = campaign.write_headers(variant, tmp_path)
    after = (folder / campaign.SHAPES).read_text()
    expected = before.replace("int kForeachThreads = 256;", "int kForeachThreads = 128;")
    assert after == expected.replace("kStreamingStores = false;", "kStreamingStores = true;")
    assert after != expected


def result(**times):
    """A case of variants a, b, ...: their times, or a word and what it is about."""
    variants = [{"constants": {}}] + [{"constants": {f"k{n}": 1}} for n in times if n != "here"]
    for variant, value in zip(variants, [times["here"], *list(times.values())[1:]], strict=True):
        variant |= {"median_us": value} if isinstance(value, float) else dict([value])
    case = {"engine": "rows", "kind": "norm", "dtype": "float32", "size": "large"}
    return case | {"variants": variants}


WRONG = ("wrong", "largest error 2\nand more")


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"here": 10.0, "a": 8.0, "b": 9.0}, ("ka = 1", 1.25)),
        ({"here": 10.0, "a": 9.9, "b": 11.0}, ("as it is", 1.0)),
        ({"here": 10.0, "a": WRONG, "b": 9.0}, ("kb = 1", 10 / 9)),
        ({"here": 10.0, "a": ("failed", "dead")}, ("as it is", 1.0)),
        ({"here": WRONG, "a": 9.0}, ("ka = 1", math.nan)),
        ({"here": WRONG, "a": WRONG}, None),
    ],
)
def test_the_fastest_right_variant_wins_if_it_gains(times, expected):
    won = campaign_report.winner(result(**times))
    if expected is None:
        assert won is None
    else:
        assert won == (expected[0], pytest.approx(expected[1], nan_ok=True))


def test_the_report():
    results = [result(here=10.0, a=5.0, b=WRONG), result(here=10.0, a=20.0, b=10.0)]
    page = campaign_report.table({"results": results, "left_out": ["norm, float32, small"]})
    assert "| norm | float32 | large | ka = 1 | 5.0 | 10.0 | 2.00 |" in page
    assert "| norm | float32 | large | as it is | 10.0 | 10.0 | 1.00 |" in page
    assert "| rows | ka = 1 | 2 | 1.000 | 0.50 | 2.00 |" in page
    assert "- rows, kb = 1: norm, float32, large: wrong: largest error 2\n" in page
    assert "No time was left for 1 cases: norm, float32, small." in page


@dataclass
class FakeWorker:
    """A process that takes a second to answer, by a clock of its own."""

    variant: dict
    clock: list[float]
    died: str = ""

    def ask(self, word, case):
        self.word = word

    def answer(self, deadline):
        if self.clock[0] + 1 > deadline:
            return {"left out": "time ran out"}
        self.clock[0] += 1
        times = dict.fromkeys(("median_us", "low_us", "high_us"), 1.0)
        return {} if self.word == "prepare" else times


def test_what_there_is_no_time_for_is_told_and_nothing_is_lost(monkeypatch):
    clock, saved = [0.0], []
    monkeypatch.setattr(campaign_measure, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    plan = {"variants": [{"engine": "rows", "folder": str(i), "constants": {}} for i in range(2)]}
    cases = [("rows", campaign_cases.Case("op", "kind", "float32", str(i))) for i in range(9)]
    workers = [FakeWorker(variant, clock) for variant in plan["variants"]]
    found = campaign_measure.run(plan, cases, workers, 20.0, lambda r: saved.append(str(r)))
    # A case takes two processes, each to prepare and to measure twice.
    assert clock[0] == 18.0
    assert [r["size"] for r in found["results"]] == ["0", "1", "2"]
    assert found["left_out"] == [f"kind, float32, {i}" for i in range(3, 9)]
    assert len(saved) == 4
    assert saved[-1] == str(found)
    clock[0] = 0.0
    cut_off = campaign_measure.run(plan, cases, workers, 11.0, lambda r: None)
    assert [r["size"] for r in cut_off["results"]] == ["0"]
    assert len(cut_off["left_out"]) == 8


def test_a_process_that_dies_or_hangs_is_told_of(tmp_path):
    deadline = time.monotonic() + 100
    dying = campaign_measure.Worker({"engine": "rows", "folder": "none", "constants": {}})
    dying.start(tmp_path, "cpu")
    hanging = campaign_measure.Worker(dying.variant, patience=0.1)
    hanging.start(tmp_path, "cpu")
    assert hanging.answer(deadline) == {"failed": "no answer in 0 s"}
    assert not hanging.process.is_alive()
    case = campaign_cases.Case("op", "kind", "float32", "large")
    answers = campaign_measure.measure(case, [dying], deadline)
    assert answers == [{"constants": {}, "failed": "its process has ended with 1"}]
    dying.ask("prepare", ())  # which raises nothing
    assert dying.answer(deadline) == {"failed": "its process has ended with 1"}


def test_archives_that_cannot_be_measured(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--campaign", str(tmp_path / "none"), "--device", "cpu"])
    assert "--campaign: there is no" in capsys.readouterr().err
    output, archive = tmp_path / "output", tmp_path / "a.tar.xz"
    output.mkdir()
    out = ["--out", str(tmp_path / "out"), "--device", "cpu"]
    for backend in ("cuda", "emu"):
        (output / campaign.PLAN).write_text(json.dumps({"backend": backend, "variants": []}))
        campaign.pack(output, archive, 1)
        assert gpu.main(["--campaign", str(archive), *out]) == 1  # the second holds nothing
    assert "has kernels for cuda, and --device cpu needs emu" in capsys.readouterr().err
    (output / "noise").write_bytes(os.urandom(2 << 20))
    with pytest.raises(campaign.CampaignError, match="has 2 MiB, and 1 may travel"):
        campaign.pack(output, archive, 1)


LOST = "own + u * kForeachThreads < count_ - 1"  # the last of the numbers that fill no pack


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """The norm of a list with 256, 128 and 64 threads; the last loses a number."""
    work = tmp_path_factory.mktemp("campaign")
    right = campaign.write_headers

    def write_headers(variant, folder):
        engine = "apex/engine/lists_gpu.h"
        if variant.constants.get("kForeachThreads") == 64:
            text = (campaign.toolchain.INCLUDE / engine).read_text()
            assert text.count(LOST.replace(" - 1", "")) == 1
            (folder / engine).parent.mkdir(parents=True, exist_ok=True)
            (folder / engine).write_text(text.replace(LOST.replace(" - 1", ""), LOST))
        return right(variant, folder)

    variants = [{"kForeachThreads": 128}, {"kForeachThreads": 64}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(campaign, "write_headers", write_headers)
        patch.setenv("MAX_JOBS", "1")  # else it would stay set
        output = campaign.compile_all(list(campaign.variants_of(listed(*variants))), EMULATED, work)
    campaign.pack(output, work / "campaign.tar.xz", 64)
    return work / "campaign.tar.xz"


@pytest.mark.builds
def test_rehearsal_on_the_emulated_gpu(archive, tmp_path):
    """Fewer threads are faster there; those that lose a number are fastest, and do not win."""
    trace = tmp_path / "trace"
    command = [sys.executable, str(ROOT / "ci" / "gpu.py"), "--campaign", str(archive)]
    command += ["--device", "cpu", "--out", str(tmp_path), "--minutes", "4"]
    settings = {"APEX_EMULATE": "32", "APEX_EMULATE_TRACE": str(trace)}
    done = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, check=False, timeout=280
    )
    log = (tmp_path / "logs" / "campaign.log").read_text()
    assert done.returncode == 1, done.stdout + done.stderr + log
    (file,) = tmp_path.glob("rehearsal-*.campaign.json")
    found = json.loads(file.read_text())
    assert [r["dtype"] for r in found["results"]] == ["bfloat16", "float32"]
    for each in found["results"]:
        here, faster, wrong = each["variants"]
        assert here["median_us"] > 0
        assert faster["median_us"] > 0
        assert "largest error" in wrong["wrong"]
        assert "median_us" not in wrong
        assert campaign_report.winner(each)[0] in ("as it is", "kForeachThreads = 128")
    assert "| norm of a list | bfloat16 | 3 tensors | " in done.stdout
    assert "lists, kForeachThreads = 64: norm of a list, float32, 3 tensors: wrong" in done.stdout
    # Each library did run with its own number: of library, kernel, grid, block.
    launches = [line.split("\t") for line in trace.read_text().splitlines()]
    blocks = {(Path(x[0].split()[0]).parts[-3], x[2].split()[0]) for x in launches}
    assert blocks == {("lists-0", "256"), ("lists-1", "128"), ("lists-2", "64")}


@pytest.mark.builds
def test_what_travels_is_small(archive):
    with tarfile.open(archive) as packed:
        names = {Path(name).name for name in packed.getnames()}
    assert names >= {"emu.so", "manifest.json", campaign.PLAN}
    assert archive.stat().st_size < 4 << 20
