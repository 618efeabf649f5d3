"""The benchmark runner measures, compares, records and reports."""

import multiprocessing
import sys
import time

import pytest
import torch

from apex_testkit import bench, bench_report
from apex_testkit.load import Load, LoadMeter, _sample


def sleeper(milliseconds):
    return lambda: time.sleep(milliseconds / 1e3)


def test_ratio_bandwidth_and_order(capsys):
    records = bench.compare(
        "nap", "short", bytes_moved=1_000_000, repeats=9, apex=sleeper(2), peer=sleeper(6)
    )
    apex, peer = records
    assert [r["contestant"] for r in records] == ["apex", "peer"]
    assert apex["ratio"] == 1
    assert 1.5 < peer["ratio"] < 6
    assert 2000 <= apex["low_us"] <= apex["median_us"] <= apex["high_us"]
    assert apex["gb_per_s"] == pytest.approx(1_000_000 / apex["median_us"] / 1e3)
    assert apex["copy_fraction"] == pytest.approx(apex["gb_per_s"] / bench.copy_bandwidth("cpu"))
    assert apex["samples"] == 9
    assert apex["torch"] == torch.__version__
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_on_a_gpu_the_time_in_a_loop_is_beside_that_on_cold_caches(monkeypatch, capsys):
    cold, in_loop = {0: 10e-6, 1: 40e-6}, {0: 20.0, 1: 30.0}
    monkeypatch.setattr(bench, "_time_cuda_cold", lambda function, calls: cold[function()])
    replays = {"apex": None, "peer": lambda: 1}
    monkeypatch.setattr(bench, "_replay", lambda name, function: replays[name])
    monkeypatch.setattr(bench, "_Launched", lambda function: function)
    loops = []
    monkeypatch.setattr(
        bench, "_loop_us", lambda function, calls: loops.append(function()) or in_loop[function()]
    )
    monkeypatch.setattr(bench, "copy_bandwidth", lambda device: 1000.0)
    monkeypatch.setattr(bench, "machine_facts", lambda device: {})
    apex, peer = bench.compare(
        "step", "x", bytes_moved=5_000_000, repeats=9, device="cuda", apex=lambda: 0, peer=lambda: 1
    )
    assert (apex["median_us"], peer["ratio"]) == pytest.approx((10, 4))
    assert (apex["loop_us"], peer["loop_ratio"]) == pytest.approx((20, 1.5))
    assert apex["copy_fraction"] == pytest.approx(0.5)
    assert (apex["is_replayed"], peer["is_replayed"]) == (False, True)
    assert loops == [0, 1, 1, 0] * 2 + [0, 1]  # in turn, from another one each time
    assert "in a loop" in capsys.readouterr().out


def test_a_gpu_waits_for_the_launches_of_a_host(monkeypatch):
    waits, events = [], []
    monkeypatch.setattr(
        torch.cuda, "_sleep", lambda cycles: events.append("wait") or waits.append(cycles)
    )
    monkeypatch.setattr(bench, "_cycles_per_second", lambda: 1e9)
    monkeypatch.setattr(bench, "_cold_buffer", lambda: torch.empty(1))

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            events.append("event")

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    launched = bench._Launched(lambda: events.append("call") or time.sleep(2e-3))
    assert bench._time_cuda_cold(launched, 2) == pytest.approx(1e-3)
    assert events == ["wait", "event", "call", "event"] * 2
    assert waits[0] == 0
    assert 4e6 <= waits[1] <= 2 * bench._MAX_WAIT_SECONDS * 1e9  # twice the 2 ms before


def test_contestants_can_be_left_out(monkeypatch):
    monkeypatch.setattr(bench, "_LEFT_OUT", ["slow", "absent"])
    records = bench.compare("op", "x", repeats=9, apex=int, slow=int, peer=int)
    assert [r["contestant"] for r in records] == ["apex", "peer"]


def test_chosen_device(monkeypatch):
    monkeypatch.setenv("APEX_BENCH_DEVICE", "cpu")
    assert bench.chosen_device() == "cpu"
    monkeypatch.delenv("APEX_BENCH_DEVICE")
    assert bench.chosen_device() == ("cuda" if torch.cuda.is_available() else "cpu")


def test_rounds_interleave():
    calls = []
    bench.compare(
        "order",
        "three",
        repeats=3,
        apex=lambda: (calls.append("a"), time.sleep(1e-3)),
        b=lambda: (calls.append("b"), time.sleep(1e-3)),
    )
    rounds = "".join(calls[6:12])
    assert rounds == "abbaab"


def test_quick_contestants_are_timed_in_batches():
    (record,) = bench.compare("pass", "nothing", repeats=9, apex=lambda: None)
    assert 0 < record["median_us"] < 20


def test_a_busy_machine_repeats_the_case_and_keeps_the_quietest(monkeypatch):
    loads = iter([Load(0.9, 0.0), Load(0.2, 0.1), Load(0.5, 0.0)])
    monkeypatch.setattr(LoadMeter, "read", lambda self: next(loads))
    (record,) = bench.compare("busy", "case", repeats=3, apex=lambda: None)
    assert (record["attempts"], record["is_noisy"]) == (3, True)
    assert (record["others_cores"], record["steal_cores"]) == (0.2, 0.1)
    assert "! others took 0.30 of a core" in bench_report.format_row(record)

    loads = iter([Load(0.9, 0.0), Load(0.05, 0.0), Load(0.5, 0.0)])
    (record,) = bench.compare("busy", "case", repeats=3, apex=lambda: None)
    assert (record["attempts"], record["is_noisy"]) == (2, False)


def test_own_work_is_not_other_load():
    meter = LoadMeter()
    end = time.perf_counter() + 0.5
    while time.perf_counter() < end:
        pass
    load = meter.read()
    assert load.total is None or 0 <= load.others < torch.multiprocessing.cpu_count()


def test_records_are_appended_and_read_back(tmp_path, monkeypatch, capsys):
    path = tmp_path / "results.csv"
    monkeypatch.setenv("APEX_BENCH_RECORDS", str(path))
    bench.compare("a", "one", repeats=3, apex=sleeper(1), peer=sleeper(1))
    bench.compare("b", "one", repeats=3, apex=sleeper(1))
    bench.compare("a", "one", repeats=4, apex=sleeper(1), peer=sleeper(1))
    assert len(path.read_text().splitlines()) == 1 + 5
    records = bench_report.read_records(path)
    assert [(r["op"], r["contestant"], r["samples"]) for r in records] == [
        ("a", "apex", 4),
        ("a", "peer", 4),
        ("b", "apex", 3),
    ]
    capsys.readouterr()
    assert bench_report.main(["table", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("# ")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("op,case\nx,y\n", 1),
        ("op,case,contestant,device,threads,malloc\nx,y,apex,cpu,2,tuned\nx,y\n", 3),
        ("op,case,contestant,device,threads,malloc\nx,y,apex,cpu,2 or 3,tuned\n", 2),
    ],
)
def test_a_broken_file_is_named(tmp_path, text, line):
    path = tmp_path / "results.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"results\.csv, line {line}: no benchmark record"):
        bench_report.read_records(path)


def test_no_contestants():
    with pytest.raises(ValueError, match="no contestant"):
        bench.compare("a", "b")


def test_plot(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path, image = tmp_path / "results.csv", tmp_path / "plot.png"
    monkeypatch.setenv("APEX_BENCH_RECORDS", str(path))
    bench.compare("a", "one", repeats=3, apex=sleeper(1), peer=sleeper(1))
    assert bench_report.main(["plot", str(path), str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")


def use_a_core(seconds, connection):
    while time.process_time() < seconds:
        pass
    connection.send("done")
    connection.recv()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_children_are_not_others():
    _, before, *_ = _sample()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=use_a_core, args=(1, there))
    child.start()
    assert here.recv() == "done"
    _, after, *_ = _sample()
    here.send("end")
    child.join()
    assert after - before >= 0.9
