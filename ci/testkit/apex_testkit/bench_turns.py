"""Which cases of a benchmark are measured now, where there may not be time for all of them.

All benchmarks run once for each turn: at first the first case of each operation and every fourth
after it, then those half-way between, at last all that has no record yet. So what is cut off is
the rest of many operations, not all of the last ones.
"""

import os
from collections import Counter
from pathlib import Path

from .bench_report import read_records

_STRIDE = 4


class Turn:
    """One of ``count`` runs of a benchmark's file, from 0; by default the only one."""

    def __init__(self, number: int = 0, count: int = 1):
        self.number, self.count = number, count
        self._seen: Counter[str] = Counter()

    def takes(self, op: str, case: str) -> bool:
        """Whether a case is measured in this turn; asked once for each, in their order."""
        index = self._seen[op]
        self._seen[op] += 1
        if self.count == 1:
            return True
        if self.number == self.count - 1:
            return (op, case) not in _recorded()
        return index % _STRIDE == self.number * _STRIDE // (self.count - 1)


def _recorded() -> set[tuple[str, str]]:
    path = Path(os.environ.get("APEX_BENCH_RECORDS", ""))
    records = read_records(path) if path.is_file() else []
    return {(record["op"], record["case"]) for record in records}


current = Turn()


def begin(number: int, count: int) -> None:
    """Let :func:`apex_testkit.bench.compare` measure a turn's cases from now on."""
    global current
    current = Turn(number, count)
