"""Tests that are skipped where a variable of the environment says so."""

from __future__ import annotations

import functools
import os
import unittest
from collections.abc import Callable
from typing import Any

__all__ = ["SKIP_FLAKY_TEST", "TEST_WITH_ROCM", "skipFlakyTest", "skipIfRocm"]

TEST_WITH_ROCM = os.getenv("APEX_TEST_WITH_ROCM", "0") == "1"
"""Whether ``APEX_TEST_WITH_ROCM`` was 1 when this was imported."""
SKIP_FLAKY_TEST = os.getenv("APEX_SKIP_FLAKY_TEST", "0") == "1"
"""Whether ``APEX_SKIP_FLAKY_TEST`` was 1 when this was imported."""


def skipIfRocm(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a test: it raises ``unittest.SkipTest`` if :data:`TEST_WITH_ROCM`."""
    return _skipped(fn, lambda: TEST_WITH_ROCM, "the test does not work on ROCm")


def skipFlakyTest(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a test: it raises ``unittest.SkipTest`` if :data:`SKIP_FLAKY_TEST`."""
    return _skipped(fn, lambda: SKIP_FLAKY_TEST, "the test is flaky")


def _skipped(
    fn: Callable[..., Any], is_skipped: Callable[[], bool], why: str
) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_skipped():
            raise unittest.SkipTest(f"{fn.__qualname__}: {why}")
        return fn(*args, **kwargs)

    return wrapper
