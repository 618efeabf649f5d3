"""ci/gpu.py without a GPU: shares of time, verdicts, reports, and the commands it would run."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from environments import ROOT

from apex_testkit import bench_report
from ci import gpu, gpu_benchmarks, gpu_first_calls, gpu_install, gpu_process, gpu_report
from ci.gpu_process import Outcome, execute

RECORD = {
    "op": "adam", "case": "2 x 10M", "contestant": "apex", "median_us": 200.0, "low_us": 190.0,
    "high_us": 210.0, "samples": 9, "ratio": 1.0, "loop_us": 210.0, "loop_ratio": 1.0,
    "bytes_moved": 560_000_000, "gb_per_s": 2800.0, "copy_gb_per_s": 3000.0, "copy_fraction": 0.93,
    "device": "cuda", "threads": 2, "malloc": "stock",
}  # fmt: skip
PEER = RECORD | {"contestant": "torch_fused", "ratio": 1.25, "loop_ratio": 1.5}


def python(code):
    return [sys.executable, "-c", code]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Run the command with a runner that only notes what it is given, and says what it is told."""
    calls = []

    def fake_execute(name, command, environment, seconds, log, cwd):
        calls.append((name, command, environment, seconds))
        if name == "benchmarks":
            outcomes, given, *runs = command[2:]
            for run in runs:
                own = gpu.outcome_name(run)
                verdict = fake_execute.verdicts.get(own, "passed")
                if verdict == "dead":
                    return Outcome(name, "failed", 1.0, "Segmentation fault")
                calls.append((own, command, environment, float(given)))
                records = Path(environment["APEX_BENCH_RECORDS"])
                bench_report.append_records(records, [RECORD | {"op": own}])
                outcome = {"run": run, "status": verdict, "seconds": 1.0, "detail": ""}
                with open(outcomes, "a") as lines:
                    lines.write(json.dumps(outcome) + "\n")
        return Outcome(name, fake_execute.verdicts.get(name, "passed"), 1.0)

    fake_execute.verdicts, fake_execute.calls = {}, calls
    monkeypatch.setattr(gpu, "execute", fake_execute)
    monkeypatch.setattr(gpu, "find_sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr(gpu_install, "is_rocm", lambda: False)
    monkeypatch.setattr(gpu_install, "environment", lambda *_: dict(os.environ))
    facts = {"card": "NVIDIA H100 80GB", "torch": "2.11.0", "commit": None, "date": "2026-01-01"}
    monkeypatch.setattr(gpu_report, "facts", lambda device: facts)
    fake_execute.main = lambda *a: gpu.main(["--out", str(tmp_path / "out"), *a])
    return fake_execute


def test_everything_runs_and_is_reported(fake, tmp_path, capsys):
    assert fake.main("--minutes", "10") == 0
    names = [name for name, *_ in fake.calls]
    packages = sorted(p.parent.name for p in ROOT.glob("packages/*/pyproject.toml"))
    assert names[:3] == [
        "first call, nvrtc, cache empty",
        "first call, nvrtc, cache filled",
        "first call, nvcc, cache not used",
    ]
    assert sorted(names[3:8]) == [f"tests {p}" for p in packages]
    sanitized = [name.partition(" ") for name in names if "check " in name]
    for tool in ("memcheck", "racecheck"):
        parts = {rest for name, _, rest in sanitized if name == tool}
        expected = {f"{p} {i + 1}/{n}" for p, n in gpu.processes().items() for i in range(n)}
        assert parts == expected
    assert [name for name, *_ in sanitized] == sorted(name for name, *_ in sanitized)
    first = {f"bench {name}, turn 1 of 3" for name in ("fused_adam", "layer_norm", "xentropy")}
    assert first <= set(names)
    assert names[-1].endswith("turn 3 of 3")  # all benchmarks once before any of them again
    assert not [name for name in names if name.startswith("bench distributed,")]
    assert not [name for name in names if name.startswith("bench training,")]  # by name alone

    benchmarks = [name for name in names if name.startswith("bench ")]
    records = bench_report.read_records(tmp_path / "out" / "nvidia-h100-80gb.csv")
    assert [record["op"] for record in records] == benchmarks
    page = (tmp_path / "out" / "nvidia-h100-80gb.md").read_text()
    steps = re.findall(r"^\| (.*) \| passed \| \d+ \|$", page, re.MULTILINE)
    assert steps == ["install", *names]
    assert "| bench fused_adam, turn 1 of 3 | 2 x 10M | 200.0 | 93% |" in page
    assert "3000 GB/s" in page
    assert f"{len(names) + 1} passed; {len(benchmarks)} figures" in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("*.partial.csv"))


def test_commands(fake):
    fake.main()
    calls = {name: (command, environment) for name, command, environment, _ in fake.calls}
    command, _ = calls["tests apex-amp"]
    assert "--device cuda --device-tests-only" in " ".join(command)
    assert command[-1] == "packages/apex-amp/tests"
    parts = gpu.processes()["apex-contrib"]
    command, environment = calls[f"racecheck apex-contrib 1/{parts}"]
    assert command[:3] == ["compute-sanitizer", "--tool", "racecheck"]
    assert "--error-exitcode 9" in " ".join(command)
    assert command[-3:] == ["--share", f"1/{parts}", "packages/apex-contrib/tests"]
    assert environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    assert calls["bench layer_norm, turn 1 of 3"][1]["APEX_BENCH_DEVICE"] == "cuda"


@pytest.mark.parametrize("options", [[], ["--nvrtc"]])
def test_nvrtc_is_taken_where_it_is_asked_for(fake, options, monkeypatch):
    monkeypatch.delenv("APEX_CUDA_COMPILER", raising=False)
    monkeypatch.setenv("APEX_JIT", "0")
    fake.main(*options)
    assert any("nvcc" in name for name, *_ in fake.calls) == (not options)
    for name, _, environment, _ in fake.calls:
        if not name.startswith("first call"):
            assert environment["APEX_JIT"] == ("1" if options else "0")
            assert environment.get("APEX_CUDA_COMPILER") == ("nvrtc" if options else None)


def test_a_first_call_is_measured_and_its_result_checked(monkeypatch, capsys):
    monkeypatch.setenv("APEX_BENCH_DEVICE", "cpu")
    gpu_first_calls.main()
    assert re.fullmatch(
        r"first step [\d.]+ ms, later ones [\d.]+ us each\n", capsys.readouterr().out
    )
    monkeypatch.setattr(gpu_first_calls.FusedAdam, "step", lambda self: None)
    with pytest.raises(AssertionError):
        gpu_first_calls.main()


def test_time_is_shared(fake):
    fake.main("--minutes", "10")
    seconds = {name: s for name, _, _, s in fake.calls}
    tests, memcheck, bench = (
        [s for name, s in seconds.items() if name.startswith(kind)]
        for kind in ("tests", "memcheck", "bench ")
    )
    assert tests == pytest.approx([0.45 * 600] * 5, rel=0.01)  # side by side
    # The fakes take no time.
    assert memcheck == pytest.approx([0.35 * 600 / 2] * len(memcheck), rel=0.01)
    assert bench == pytest.approx([600] * len(bench), rel=0.01)  # shared by their process


@pytest.mark.parametrize("verdict", ["failed", "timed out"])
def test_a_failure_stops_nothing_and_is_told(fake, verdict, capsys):
    fake.verdicts |= {"tests apex-amp": verdict}
    assert fake.main() == 1
    names = [name for name, *_ in fake.calls]
    assert any(name.startswith("racecheck apex-parallel ") for name in names)
    assert "bench fused_adam, turn 1 of 3" in names
    assert f"1 {verdict}" in capsys.readouterr().out.splitlines()[-1]


def test_an_error_in_a_step_is_a_failure_of_that_step(fake, monkeypatch, capsys):
    def missing():
        raise FileNotFoundError("compute-sanitizer was not found")

    monkeypatch.setattr(gpu, "find_sanitizer", missing)
    assert fake.main() == 1
    assert any(name.startswith("bench") for name, *_ in fake.calls)
    assert "FileNotFoundError: compute-sanitizer was not found" in capsys.readouterr().err


def test_only_some_steps(fake):
    assert fake.main("--only", "bench,tests") == 0
    kinds = [name.split()[0] for name, *_ in fake.calls]
    assert list(dict.fromkeys(kinds)) == ["tests", "benchmarks", "bench"]


def test_only_some_benchmarks(fake):
    assert fake.main("--only", "bench", "--benchmarks", "xentropy, training") == 0
    turns = [f"turn {i} of 3" for i in (1, 2, 3)]
    expected = [f"bench {name}, {turn}" for turn in turns for name in ("xentropy", "training")]
    assert [name for name, *_ in fake.calls] == ["benchmarks", *expected]


def test_a_benchmark_that_ends_the_process_is_alone_in_it(fake, tmp_path, capsys):
    fake.verdicts |= {"bench layer_norm, turn 1 of 3": "dead"}
    assert fake.main("--only", "bench", "--benchmarks", "xentropy,layer_norm,rms_norm") == 1
    names = [name for name, *_ in fake.calls]
    assert names[:4] == ["benchmarks", "bench xentropy, turn 1 of 3", "benchmarks", names[3]]
    assert names[3] == "bench rms_norm, turn 1 of 3"
    page = (tmp_path / "out" / "nvidia-h100-80gb.md").read_text()
    assert "| bench layer_norm, turn 1 of 3 | failed |" in page
    assert "\nbench layer_norm, turn 1 of 3:\n\n```text\nSegmentation fault\n```\n" in page
    assert "| bench layer_norm, turn 2 of 3 | passed |" in page


def benchmark_outcomes(tmp_path, seconds, turns=1, **sources):
    for name, source in sources.items():
        (tmp_path / f"bench_{name}.py").write_text(source)
    runs = [f"{t}/{turns}:{tmp_path}/bench_{name}.py" for t in range(turns) for name in sources]
    gpu_benchmarks.main(str(tmp_path / "outcomes"), str(seconds), *runs)
    lines = map(json.loads, (tmp_path / "outcomes").read_text().splitlines())
    return [(Path(o["run"]).stem, o["status"], o["detail"]) for o in lines]


def test_benchmarks_in_one_process(tmp_path):
    outcomes = benchmark_outcomes(
        tmp_path,
        4,
        good="import sys\nsys.seen = __name__",
        bad="raise ValueError('why')",
        slow="import time\ntry:\n    time.sleep(60)\nexcept Exception:\n    pass",
        last="import sys\nassert sys.seen == '__main__'",
    )
    assert outcomes == [
        ("bench_good", "passed", ""),
        ("bench_bad", "failed", "ValueError: why"),
        ("bench_slow", "timed out", ""),
        ("bench_last", "passed", ""),
    ]


def test_each_turn_measures_other_cases_and_none_is_lost_or_measured_twice(tmp_path, monkeypatch):
    records = tmp_path / "records.csv"
    monkeypatch.setenv("APEX_BENCH_RECORDS", str(records))
    source = """
from apex_testkit.bench import compare
for op in ("a", "b"):
    for case in range(7):
        compare(op, str(case), repeats=3, apex=int)
"""
    benchmark_outcomes(tmp_path, 60, turns=3, one=source)
    measured = bench_report.read_records(records)
    assert [r["op"] + r["case"] for r in measured] == (
        ["a0", "a4", "b0", "b4", "a2", "a6", "b2", "b6", "a1", "a3", "a5", "b1", "b3", "b5"]
    )


def test_amd_and_rehearsals_have_no_sanitizer(fake, monkeypatch, capsys):
    assert fake.main("--only", "sanitizer", "--device", "cpu") == 0
    monkeypatch.setattr(gpu_install, "is_rocm", lambda: True)
    assert fake.main("--only", "sanitizer") == 0
    assert fake.calls == []
    assert capsys.readouterr().out.count("skipped    sanitizer ") == 4


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--only", "tests,speed"], "got 'speed'"),
        (["--benchmarks", "speed"], "--benchmarks: there is no bench_speed.py"),
        (["--minutes", "0"], "--minutes must be positive"),
        (["--wheels", str(ROOT / "docs")], "holds no wheel of Apex"),
    ],
)
def test_bad_arguments(fake, arguments, complaint, capsys):
    with pytest.raises(SystemExit) as info:
        fake.main(*arguments)
    assert info.value.code == 2
    assert complaint in capsys.readouterr().err
    assert fake.calls == []


def test_without_a_gpu_it_says_what_to_do(tmp_path, monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path)]) == 1
    assert "finds no GPU. Install a torch that is built for it" in capsys.readouterr().err


def test_missing_test_tools_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_install, "TEST_TOOLS", ("pytest", "no_such_tool"))
    with pytest.raises(gpu_install.InstallError, match="the tests need no-such-tool"):
        gpu_install.check_tools([tmp_path])
    (tmp_path / "no_such_tool.py").write_text("")
    gpu_install.check_tools([tmp_path])


def test_wheels_go_into_a_folder_of_their_own(source_wheels, tmp_path):
    """Two wheels that share the package apex, installed beside what runs this, and importable."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for package in ("apex-amp", "apex-contrib"):
        wheel = source_wheels[package]
        (wheels / wheel.name).write_bytes(wheel.read_bytes())
    environment = gpu_install.environment(tmp_path, wheels, "cpu")
    assert environment["APEX_JIT"] == "0"
    code = "import apex.amp, apex.contrib; print(apex.amp.__file__, apex.contrib.__file__)"
    found = subprocess.check_output(python(code), env=environment, text=True)
    amp, contrib = found.split()
    assert amp.startswith(str(tmp_path))
    assert contrib.startswith(str(tmp_path))


def test_a_broken_wheel_is_named(tmp_path):
    (tmp_path / "apex_amp-0.1.0-py3-none-any.whl").write_text("not a wheel")
    with pytest.raises(gpu_install.InstallError, match="apex_amp"):
        gpu_install.environment(tmp_path, tmp_path, "cpu")


def run_code(code, seconds, log):
    return execute("code", python(code), dict(os.environ), seconds, log, log.parent)


def test_execute_passed_and_failed(tmp_path):
    passed = run_code("print('one'); print('two')", 60, tmp_path / "logs" / "a.log")
    assert (passed.status, passed.detail) == ("passed", "two")
    failed = run_code("print('before'); raise ValueError('why')", 60, tmp_path / "b.log")
    assert failed.status == "failed"
    assert "ValueError: why" in failed.detail
    assert "before" in (tmp_path / "b.log").read_text()


def test_execute_ends_children_with_what_hangs(tmp_path):
    child = "import time; open('child', 'w').write(str(__import__('os').getpid())); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    start = time.monotonic()
    outcome = run_code(parent, 3, tmp_path / "a.log")
    assert outcome.status == "timed out"
    assert time.monotonic() - start < 30
    pid = int((tmp_path / "child").read_text())
    for _ in range(50):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail(f"the child {pid} lives on")


def test_find_sanitizer(tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text("")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert gpu_process.find_sanitizer() == str(tool)


def test_table_shows_both_ratios():
    from apex_testkit.bench_report import markdown

    row = markdown([RECORD, PEER]).splitlines()[-1]
    assert row == "| adam | 2 x 10M | 200.0 | 93% | torch_fused 1.25 (1.50) |"


def test_failures_are_told_before_the_end(tmp_path):
    (tmp_path / "test_two.py").write_text(
        "import os\ndef test_bad(): assert 1 == 2\ndef test_last(): os._exit(5)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "ci.gpu_tests", str(tmp_path)]
    alone = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}  # no worker's
    done = subprocess.run(
        command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 5
    assert "test_bad (call)" in done.stdout
    assert "assert 1 == 2" in done.stdout
