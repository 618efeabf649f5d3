"""The benchmark runner: contestants interleaved in one process, medians, bandwidth, honest load.

python -m apex_testkit.bench table results.csv
python -m apex_testkit.bench plot results.csv results.png
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from . import bench_turns
from .bench_report import append_records, format_row, machine_facts, main
from .load import Load, LoadMeter

OURS = "apex"  # the contestant that the others are compared with
MAX_OTHER_LOAD = 0.12  # of a core; a busier attempt is repeated
MAX_ATTEMPTS = 3
_WARM_UP_CALLS = 3
_LOOP_SAMPLES, _LOOP_CALLS = 5, 20  # whose launches overlap with the work of those before
_LOOP_SECONDS = 20e-3  # of fewer calls where one is slow
_SAMPLE_SECONDS = 500e-6  # a sample repeats a quick contestant until it lasts about this long
_CASE_SECONDS = float(os.environ.get("APEX_BENCH_SECONDS", "2"))  # unless `repeats` is given
# Contestants that are left out, by name: where compiling peers takes longer than there is time.
_LEFT_OUT = os.environ.get("APEX_BENCH_LEAVE_OUT", "").split(",")
_MIN_SAMPLES, _MAX_SAMPLES = 9, 300
_MAX_WAIT_SECONDS = 20e-3  # of a GPU, for the launches of a slow host
_COPY_BYTES = 256 << 20  # beyond any cache


def chosen_device() -> str:
    """Return what benchmarks run on: APEX_BENCH_DEVICE, else cuda where there is one, else cpu."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    return os.environ.get("APEX_BENCH_DEVICE") or default


@dataclass(frozen=True)
class Timing:
    """One contestant's samples, in microseconds per call."""

    median_us: float
    low_us: float  # 10th percentile
    high_us: float  # 90th percentile
    samples: int
    # Of a training, whose call is a step: tokens or pictures, how many, and what came of it.
    work: str | None = None
    work_per_step: int | None = None
    peak_bytes: int | None = None
    loss: float | None = None


def compare(
    op: str,
    case: str,
    bytes_moved: int | None = None,
    repeats: int | None = None,
    device: str = "cpu",
    **contestants: Callable[[], object],
) -> list[dict]:
    """Time ``contestants`` against each other, print a row for each, and return the records.

    Every round calls each contestant once, in an order that rotates, after a warm-up of three
    calls each. A case in which other processes took more than 12 % of a core is repeated, three
    attempts at most; the quietest counts, and is marked with ``!`` if none was quiet.

    Args:
        op: what is measured; the record's name.
        case: sizes and dtypes, in words.
        bytes_moved: each input read once, each output written once, in bytes per call. With it
            the row shows GB/s and the fraction of the bandwidth of a copy in the same process.
        repeats: rounds; default: as many as fill two seconds, 9 to 300.
        device: "cpu" (wall clock) or "cuda" (CUDA events). On a GPU a sample is one call on cold
            caches, which 256 MiB of other memory were written through before, replayed from a CUDA
            graph. A contestant that cannot be captured is launched while the GPU waits, so that
            its host's time is not in the sample. The time of a call in a loop, launch and Python
            included and caches warm, is measured beside it.
        contestants: callables without arguments. ``apex`` is ours; ratios are peer's time / ours.

    Returns:
        Nothing where the case is not of this turn (:mod:`apex_testkit.bench_turns`), else
        one record per contestant: op, case, contestant, median_us, low_us, high_us (10th and 90th
        percentile), samples, ratio, loop_us, loop_ratio, is_replayed (on a GPU), gb_per_s,
        copy_fraction, bytes_moved, others_cores, steal_cores, attempts, is_noisy, and the
        machine's facts.
        Appended to the csv file that APEX_BENCH_RECORDS names, a line each.
    """
    if not contestants:
        raise ValueError(f"compare: {op}, {case}: no contestant was given")
    if not bench_turns.current.takes(op, case):
        return []
    contestants = {name: f for name, f in contestants.items() if name not in _LEFT_OUT}
    if torch.device(device).type != "cuda":
        timings, load, attempts = _quietest(contestants, repeats, _time_cpu)
        return _report(op, case, timings, load, attempts, device, bytes_moved)
    replays = {name: _replay(name, f) for name, f in contestants.items()}
    timed = {n: replays[n] or _Launched(f) for n, f in contestants.items()}
    timings, load, attempts = _quietest(timed, repeats, _time_cuda_cold)
    is_replayed = {name: replay is not None for name, replay in replays.items()}
    del replays, timed  # and the memory of their graphs
    loop_us = _loops_us(contestants, {name: t.median_us * 1e-6 for name, t in timings.items()})
    return _report(op, case, timings, load, attempts, device, bytes_moved, loop_us, is_replayed)


def record_samples(
    op: str, case: str, samples: dict[str, list[float]], load: Load, device="cpu", facts=None
) -> list[dict]:
    """Record, as :func:`compare` does, what a benchmark has measured itself.

    Args:
        samples: by contestant, microseconds.
        load: what other processes took meanwhile; its own other processes count among them.
        facts: by contestant, more of its :class:`Timing`.
    """
    timings = {
        name: replace(_summarize(values), **(facts[name] if facts else {}))
        for name, values in samples.items()
    }
    return _report(op, case, timings, load, 1, device, None)


def _report(
    op, case, timings, load, attempts, device, bytes_moved, loop_us=None, is_replayed=None
) -> list[dict]:
    copy = copy_bandwidth(device) if bytes_moved else None
    ours = timings.get(OURS)
    records = []
    for name, timing in timings.items():
        speed = bytes_moved / timing.median_us / 1e3 if bytes_moved else None
        records.append(
            {
                "op": op,
                "case": case,
                "contestant": name,
                **vars(timing),
                "ratio": timing.median_us / ours.median_us if ours else None,
                "loop_us": loop_us and loop_us[name],
                "loop_ratio": loop_us[name] / loop_us[OURS] if loop_us and ours else None,
                "is_replayed": is_replayed and is_replayed[name],
                "bytes_moved": bytes_moved,
                "gb_per_s": speed,
                "copy_gb_per_s": copy,
                "copy_fraction": speed / copy if speed and copy else None,
                "others_cores": load.others,
                "steal_cores": load.steal,
                "attempts": attempts,
                "is_noisy": load.total is not None and load.total > MAX_OTHER_LOAD,
                "device": str(device),
                **machine_facts(str(device)),
            }
        )
        print(format_row(records[-1]), flush=True)
    path = os.environ.get("APEX_BENCH_RECORDS")
    if path and records:
        append_records(Path(path), records)
    return records


def _quietest(contestants, repeats, timer) -> tuple[dict[str, Timing], Load, int]:
    """Measure until an attempt is quiet; return the quietest one and the number of attempts."""
    best = None
    attempts = 0
    while attempts < MAX_ATTEMPTS:
        attempts += 1
        timings, load = _measure(contestants, repeats, timer)
        if best is None or load.total < best[1].total:
            best = timings, load
        if load.total is None or load.total <= MAX_OTHER_LOAD:
            break
    return *best, attempts


def _measure(contestants, repeats, timer) -> tuple[dict[str, Timing], Load]:
    seconds, calls = {}, {}
    for name, function in contestants.items():
        for _ in range(_WARM_UP_CALLS):
            seconds[name] = timer(function, 1)
        calls[name] = max(1, round(_SAMPLE_SECONDS / max(seconds[name], 1e-9)))
    if repeats is None:
        round_seconds = sum(seconds[name] * calls[name] for name in contestants)
        repeats = min(_MAX_SAMPLES, max(_MIN_SAMPLES, round(_CASE_SECONDS / round_seconds)))
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    meter = LoadMeter()
    for i in range(repeats):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(timer(contestants[name], calls[name]) * 1e6)
    load = meter.read()
    return {name: _summarize(values) for name, values in samples.items()}, load


def _summarize(samples_us: list[float]) -> Timing:
    ordered = sorted(samples_us)
    last = len(ordered) - 1
    low, high = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
    return Timing(statistics.median(ordered), low, high, len(ordered))


def _time_cpu(function: Callable, calls: int) -> float:
    """Return seconds per call."""
    start = time.perf_counter_ns()
    for _ in range(calls):
        function()
    return (time.perf_counter_ns() - start) / calls * 1e-9


def _time_cuda(function: Callable, calls: int) -> float:
    """Return seconds per call between two events on the current stream."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls * 1e-3


@cache
def _cold_buffer() -> torch.Tensor:
    return torch.empty(_COPY_BYTES, dtype=torch.int8, device="cuda")


class _Launched:
    """A contestant whose launches, while it is timed, queue up behind a GPU that is kept waiting.

    Without that, the time between its two events would be the host's.
    """

    def __init__(self, function: Callable):
        self.function = function
        self.host_seconds = 0.0  # that the latest call took to return

    def wait(self) -> None:
        """Let the GPU wait for about twice as long as the host needs to launch."""
        torch.cuda._sleep(round(2 * self.host_seconds * _cycles_per_second()))

    def __call__(self) -> None:
        start = time.perf_counter()
        self.function()
        self.host_seconds = min(time.perf_counter() - start, _MAX_WAIT_SECONDS)


@cache
def _cycles_per_second() -> float:
    """Return how many cycles of torch.cuda._sleep a second has."""
    cycles = 10_000_000
    torch.cuda._sleep(cycles)
    return cycles / _time_cuda(lambda: torch.cuda._sleep(cycles), 3)


def _time_cuda_cold(function: Callable, calls: int) -> float:
    """Return seconds per call, each between two events of its own and on cold caches."""
    total_ms = 0.0
    for _ in range(calls):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _cold_buffer().zero_()
        if isinstance(function, _Launched):
            function.wait()
        start.record()
        function()
        end.record()
        end.synchronize()
        total_ms += start.elapsed_time(end)
    return total_ms / calls * 1e-3


def _replay(name: str, function: Callable) -> Callable | None:
    """Return a contestant as a CUDA graph's replay; None if it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP_CALLS):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            function()
    except Exception as error:  # which one is up to the contestant
        print(f"{name} is launched from Python: {error}".splitlines()[0], flush=True)
        _end_failed_capture()
        return None
    return graph.replay


def _end_failed_capture() -> None:
    """Free torch's random numbers from the capture, which they would wait for the end of."""
    torch.cuda.synchronize()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    fresh = torch.Generator(generator.device).manual_seed(0)
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


def _loops_us(contestants: dict[str, Callable], seconds: dict[str, float]) -> dict[str, float]:
    """Return microseconds per call in a loop as a program has it: the slower of host and GPU.

    Args:
        contestants: their loops take turns, in an order that rotates.
        seconds: that a call takes, about.
    """
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for i in range(_LOOP_SAMPLES):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            calls = max(1, min(_LOOP_CALLS, round(_LOOP_SECONDS / seconds[name])))
            samples[name].append(_loop_us(contestants[name], calls))
    return {name: statistics.median(values) for name, values in samples.items()}


def _loop_us(function: Callable, calls: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(calls):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - start) / calls * 1e-3


@cache
def copy_bandwidth(device: str) -> float:
    """Return the bandwidth of ``Tensor.copy_`` in GB/s, reads and writes counted, beyond caches."""
    source = torch.randn(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source).copy_(source)
    timer = _time_cuda if source.is_cuda else _time_cpu
    seconds = statistics.median(timer(lambda: target.copy_(source), 1) for _ in range(9))
    return 2 * _COPY_BYTES / seconds / 1e9


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
