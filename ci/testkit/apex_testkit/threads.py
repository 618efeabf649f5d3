"""Runs functions in threads at once, so that what they share shows whether it needs a lock."""

import sys
import threading
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 500  # kernels may have to be compiled


def together(*functions: Callable[[], Any]) -> list[Any]:
    """What functions return that start at once, each in a thread of its own.

    With a GIL, threads change every microsecond instead of every 5 ms: between most lines.

    Raises:
        BaseException: the first that a function raised.
    """
    start = threading.Barrier(len(functions), timeout=TIMEOUT_S)
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            start.wait()
            results[index] = functions[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(functions))]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    finally:
        sys.setswitchinterval(before)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    return results
