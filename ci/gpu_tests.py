"""A pytest plugin for runs on a GPU that may end early: ``-p ci.gpu_tests``.

Failures are told when they happen, because a run that is ended tells nothing at its end. A process
whose GPU context a kernel has broken ends, and pytest-xdist starts another: every later test in it
would fail.
"""

import os
import sys

import pytest
import torch


def pytest_runtest_logreport(report):
    if report.failed and not os.environ.get("PYTEST_XDIST_WORKER"):
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish():
    if not os.environ.get("PYTEST_XDIST_WORKER") or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the GPU context of this process is broken: {error}", file=sys.stderr, flush=True)
        os._exit(3)
