"""Named stopwatches, in seconds, that wait for the GPU where there is one."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from ._printing import print_rank_last


def _now() -> float:
    if torch.cuda.is_initialized():  # otherwise no kernel runs, and asking would start CUDA
        torch.cuda.synchronize()
    return time.perf_counter()


class _Timer:
    """Adds up the seconds between ``start`` and ``stop``."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.elapsed_ = 0.0
        self.started_ = False
        self.start_time = 0.0

    def start(self) -> None:
        """Begin; ``RuntimeError`` if it runs."""
        if self.started_:
            raise RuntimeError(f"timer {self.name_!r}: start() while it runs")
        self.started_, self.start_time = True, _now()

    def stop(self) -> None:
        """Add the seconds since ``start``; ``RuntimeError`` if it does not run."""
        if not self.started_:
            raise RuntimeError(f"timer {self.name_!r}: stop() without start()")
        self.elapsed_ += _now() - self.start_time
        self.started_ = False

    def reset(self) -> None:
        """Forget all seconds, and stop."""
        self.elapsed_, self.started_ = 0.0, False

    def elapsed(self, reset: bool = True) -> float:
        """Seconds so far; a running timer goes on, from zero if ``reset``."""
        was_running = self.started_
        if was_running:
            self.stop()
        seconds = self.elapsed_
        if reset:
            self.reset()
        if was_running:
            self.start()
        return seconds


class _Timers:
    """Timers by name; ``timers("forward")`` makes one when it is first asked for."""

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def __call__(self, name: str) -> _Timer:
        return self.timers.setdefault(name, _Timer(name))

    def write(
        self,
        names: Iterable[str],
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = False,
    ) -> None:
        """Add ``seconds / normalizer`` of each timer to a TensorBoard writer, as ``name-time``."""
        _check_normalizer(normalizer)
        for name in names:
            seconds = self.timers[name].elapsed(reset) / normalizer
            writer.add_scalar(f"{name}-time", seconds, iteration)

    def log(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """Print ``milliseconds / normalizer`` of each timer, on the last rank."""
        _check_normalizer(normalizer)
        times = [f"{n}: {self.timers[n].elapsed(reset) * 1e3 / normalizer:.2f}" for n in names]
        print_rank_last("time (ms) | " + " | ".join(times))


def _check_normalizer(normalizer: float) -> None:
    if normalizer <= 0:
        raise ValueError(f"normalizer: expected more than 0, got {normalizer}")
