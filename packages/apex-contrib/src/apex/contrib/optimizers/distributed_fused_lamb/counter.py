"""A number that several threads count with."""

from __future__ import annotations

import threading

__all__ = ["AtomicCounter"]


class AtomicCounter:
    """A number that several threads may raise."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def add(self, n: int) -> int:
        """Add ``n``; return the new value."""
        with self._lock:
            self.value += n
            return self.value
