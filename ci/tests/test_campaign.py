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


def test_a_host_half_that_does_not_compile_is_told_of_before_anything_travels(
    tmp_path, monkeypatch
):
    def build(ops, *_, **options):
        assert [op.name for op in ops] == ["multi_tensor_l2norm"]
        raise campaign.BuildError("error: planted")

    monkeypatch.setattr(campaign, "build", build)
    variants = list(campaign.variants_of(listed({"kForeachThreads": 128})))[1:]
    with pytest.raises(campaign.CampaignError, match=r"lists, {'kForeachThreads': 128}: .*planted"):
        campaign.compile_all(variants, tmp_path)


def result(**times):
    """A case of variants a, b, ...: their times, or a word and what it is about."""
    variants = [{"constants": {}}] + [{"constants": {f"k{n}": 1}} for n in times if n != "here"]
    for variant, value in zip(variants, [times["here"], *list(times.values())[1:]], strict=True):
        variant |= {"median_us": value} if isinstance(value, float) else dict([value])
    case = {"engine": "rows", "kind": "norm", "dtype": "float32", "size": "large"}
    return case | {"prepared_s": 1.5, "variants": variants}


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
    assert "To start, to compile kernels and to compare results took 3 s." in page
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
    answers = campaign_measure.measure(case, [dying], deadline)["variants"]
    assert answers == [{"constants": {}, "failed": "its process has ended with 1"}]
    dying.ask("prepare", ())  # which raises nothing
    assert dying.answer(deadline) == {"failed": "its process has ended with 1"}


def test_archives_that_cannot_be_measured(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--campaign", str(tmp_path / "none"), "--device", "cpu"])
    assert "--campaign: there is no" in capsys.readouterr().err
    output, archive = tmp_path / "output", tmp_path / "a.tar.xz"
    output.mkdir()
    (output / campaign.PLAN).write_text(json.dumps({"headers": "before", "variants": []}))
    campaign.pack(output, archive)
    arguments = ["--campaign", str(archive), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert gpu.main(arguments) == 1
    assert "was made from other sources than this checkout has" in capsys.readouterr().err


LOST = "own + u * kForeachThreads < count_ - 1"  # the last of the numbers that fill no pack


KEPT = LOST.removesuffix(" - 1")
NO_KERNEL = "#ifndef APEX_RTC_HOST\n#error planted\n#endif\n"  # the host's half compiles


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """The norm of a list by 256, 128, 64 and 32 threads: 64 lose a number, 32 do not compile."""
    work = tmp_path_factory.mktemp("campaign")
    right = campaign.write_headers
    engine = "apex/engine/lists_gpu.h"
    text = (campaign.toolchain.INCLUDE / engine).read_text()
    assert text.count(KEPT) == 1
    planted = {64: text.replace(KEPT, LOST), 32: text + NO_KERNEL}

    def write_headers(variant, folder):
        if changed := planted.get(variant.constants.get("kForeachThreads")):
            (folder / engine).parent.mkdir(parents=True, exist_ok=True)
            (folder / engine).write_text(changed)
        return right(variant, folder)

    variants = [{"kForeachThreads": threads} for threads in (128, 64, 32)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(campaign, "write_headers", write_headers)
        patch.setenv("MAX_JOBS", "1")  # else it would stay set
        output = campaign.compile_all(list(campaign.variants_of(listed(*variants))), work)
    campaign.pack(output, work / "campaign.tar.xz")
    return work / "campaign.tar.xz"


@pytest.mark.builds
def test_rehearsal_on_the_emulated_gpu(archive, tmp_path):
    """Fewer threads are faster there; those that lose a number are fastest, and do not win."""
    trace = tmp_path / "trace"
    command = [sys.executable, str(ROOT / "ci" / "gpu.py"), "--campaign", str(archive)]
    command += ["--device", "cpu", "--out", str(tmp_path), "--minutes", "4"]
    settings = os.environ | {"APEX_EMULATE_TRACE": str(trace)}
    done = subprocess.run(
        command, env=settings, capture_output=True, text=True, check=False, timeout=280
    )
    log = (tmp_path / "logs" / "campaign.log").read_text()
    assert done.returncode == 1, done.stdout + done.stderr + log
    (file,) = tmp_path.glob("rehearsal-*.campaign.json")
    found = json.loads(file.read_text())
    assert [r["dtype"] for r in found["results"]] == ["bfloat16", "float32"]
    for each in found["results"]:
        here, faster, wrong, broken = each["variants"]
        assert here["median_us"] > 0
        assert faster["median_us"] > 0
        assert "largest error" in wrong["wrong"]
        assert "NVRTC 13.7 did not compile apex::gpu::foreach_" in broken["failed"]
        assert "median_us" not in wrong | broken
        assert campaign_report.winner(each)[0] in ("as it is", "kForeachThreads = 128")
    assert "| norm of a list | bfloat16 | 3 tensors | " in done.stdout
    assert "lists, kForeachThreads = 64: norm of a list, float32, 3 tensors: wrong" in done.stdout
    # The page says what the compiler did, and no op but those of the archive was compiled.
    assert "lists, kForeachThreads = 32: norm of a list, bfloat16, 3 tensors: failed" in done.stdout
    assert "error: #error planted" in done.stdout
    assert "apex: compiling GPU kernels by nvrtc-13.7-sm_90" in log
    assert "about 10 to 70 s" not in log
    # Each library launched with its own number, kernels that were compiled with it.
    blocks = {line.split("\t")[2].split()[0] for line in trace.read_text().splitlines()}
    assert blocks == {"256", "128", "64"}


@pytest.mark.builds
def test_what_travels_is_small(archive):
    with tarfile.open(archive) as packed:
        names = {Path(name).name for name in packed.getnames()}
    assert names >= {"gpu-rtc.so", "manifest.json", "gpu_shapes.h", campaign.PLAN}
    assert archive.stat().st_size < 1 << 20
