"""Fixtures that run a check on 2 or 4 real gloo processes, kept between tests while healthy."""

import inspect
import itertools
import multiprocessing
import runpy
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).with_name("rank_process.py"))
COLLECTIVE_TIMEOUT_S = 60


class Ranks:
    """Processes of one process group; ``ranks(check, **kwargs)`` runs ``check(rank, world)``.

    Any failure, death or overrun of a rank ends all of them and fails the test with every rank's
    traceback; the next test gets new processes.
    """

    def __init__(self, world_size, folder):
        self.world_size, self._folder = world_size, folder
        self._counter = itertools.count()
        self._processes, self._connections = [], []

    def _start(self):
        # A server forked from a fresh interpreter: no threads to inherit, torch imported once, and
        # what optimizers and DTensors import at their first call: a second of each process.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pytest", "torch._dynamo", "torch.distributed.tensor"])
        init_file = self._folder / f"init_{self.world_size}_{next(self._counter)}"
        for rank in range(self.world_size):
            here, there = context.Pipe()
            job = {
                "connection": there,
                "rank": rank,
                "world_size": self.world_size,
                "init_file": str(init_file),
                "timeout_s": COLLECTIVE_TIMEOUT_S,
            }
            process = context.Process(target=runpy.run_path, args=(SCRIPT, {"job": job}))
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)

    def failures(self, check, *, timeout_s=90, **kwargs):
        """Run a check; by rank, the traceback or the exit code of those that did not pass."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((inspect.getfile(check), check.__name__, kwargs))
        failures = self._collect(time.monotonic() + timeout_s)
        if failures:
            self.stop()
        return failures

    def __call__(self, check, *, expect_death=(), **kwargs):
        failures = self.failures(check, **kwargs)
        unexpected = {rank: text for rank, text in failures.items() if rank not in expect_death}
        if unexpected or set(expect_death) - set(failures):
            pytest.fail("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))

    def _collect(self, deadline):
        waiting = dict(zip(self._connections, range(self.world_size), strict=True))
        failures = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0, deadline - time.monotonic()))
            if not ready:
                failures |= dict.fromkeys(waiting.values(), "did not finish in time")
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    report = connection.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(10)
                    report = f"died with exit code {self._processes[rank].exitcode}"
                if report is not None:
                    failures[rank] = report
        return failures

    def stop(self):
        for connection in self._connections:
            try:
                connection.send(None)
            except OSError:
                continue  # that rank is gone already
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []


def _ranks(world_size, tmp_path_factory):
    ranks = Ranks(world_size, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """Runs a check on 2 processes."""
    yield from _ranks(2, tmp_path_factory)


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory):
    """Runs a check on 4 processes."""
    yield from _ranks(4, tmp_path_factory)


@pytest.fixture
def doomed_ranks(tmp_path_factory):
    """Two processes of this test alone, one of which is to die."""
    yield from _ranks(2, tmp_path_factory)


@pytest.fixture
def four_doomed_ranks(tmp_path_factory):
    """Four processes of this test alone, one of which is to die."""
    yield from _ranks(4, tmp_path_factory)
