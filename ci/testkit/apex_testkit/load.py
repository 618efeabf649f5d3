"""How busy the machine was with other work while a benchmark ran."""

import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PROC_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Load:
    """Shares of one core, so 0.12 is 12 % of a core; None where the system does not tell."""

    others: float | None  # processor time of all but this process and its children
    steal: float | None  # processor time that the hypervisor withheld

    @property
    def total(self) -> float | None:
        """What was taken away from the benchmark, in cores."""
        if self.others is None or self.steal is None:
            return None
        return self.others + self.steal


class LoadMeter:
    """Measures :class:`Load` between its construction and :meth:`read`.

    Children are those of :mod:`multiprocessing` that run at both times: the other ranks of a
    benchmark. Resolution is a tick of /proc/stat, usually 10 ms: spans below a second are rough.
    """

    def __init__(self):
        self._seconds, self._own, self._busy, self._steal = _sample()

    def read(self) -> Load:
        seconds, own, busy, steal = _sample()
        elapsed = seconds - self._seconds
        if busy is None or self._busy is None or elapsed <= 0:
            return Load(None, None)
        others = (busy - self._busy) - (own - self._own)
        return Load(max(0.0, others / elapsed), max(0.0, (steal - self._steal) / elapsed))


def _sample() -> tuple[float, float, float | None, float | None]:
    """Return seconds now, then CPU seconds: own and the children's, of all processes, stolen."""
    try:
        own = time.process_time() + sum(map(_seconds_of, multiprocessing.active_children()))
        fields = _PROC_STAT.read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return time.perf_counter(), time.process_time(), None, None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(f) for f in fields[:8])
    busy = (user + nice + system + irq + softirq) / _TICKS_PER_SECOND
    return time.perf_counter(), own, busy, steal / _TICKS_PER_SECOND


def _seconds_of(child: multiprocessing.process.BaseProcess) -> float:
    """CPU seconds of a running child."""
    stat = Path(f"/proc/{child.pid}/stat").read_text()
    user, system = stat.rpartition(")")[2].split()[11:13]  # the name before may have spaces
    return (int(user) + int(system)) / _TICKS_PER_SECOND
