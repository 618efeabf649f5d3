"""Test cases whose methods run on several processes of a process group.

They stand on torch's own test classes, which need the package ``expecttest`` and, in some versions
of torch, ``setuptools``.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import unittest
from typing import Any

import torch
import torch.distributed as dist

from ._ucc_util import HAS_UCC

try:
    from torch.testing._internal import common_distributed
except ImportError as error:
    raise ImportError(
        f"apex.distributed_testing: torch's test classes cannot be imported ({error}). "
        "pip install expecttest setuptools"
    ) from error

__all__ = [
    "HAS_TORCH_UCC_COMPAT_NVIDIA_DRIVER",  # noqa: F822  (__getattr__ asks the driver)
    "HAS_UCC",
    "DistributedTestBase",
    "GlooDistributedTestBase",
    "NcclDistributedTestBase",
    "UccDistributedTestBase",
]

_MAX_WORLD_SIZE = 4
_UCC_DRIVER = (470, 42, 1)  # the oldest of NVIDIA's drivers that UCC works with


def __getattr__(name: str) -> Any:
    if name == "HAS_TORCH_UCC_COMPAT_NVIDIA_DRIVER":  # only when asked: it starts a program
        return _has_driver_for_ucc()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _has_driver_for_ucc() -> bool:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    versions = answer.stdout.split()
    return bool(versions) and tuple(map(int, versions[0].split("."))) >= _UCC_DRIVER


class DistributedTestBase(common_distributed.MultiProcessTestCase):
    """A test method runs on every rank, after the process group is there and its GPU is chosen.

    ``self.rank`` and ``self.world_size`` tell a method where it runs. A rank that fails fails the
    test. Processes are forked from a server that has imported torch and nothing else, so torch is
    imported once for all of them; as with spawned ones, the test's module is imported in each.

    The number of ranks is that of the GPUs, or what the variable ``WORLD_SIZE`` says on a machine
    without any (2 by default); at most 4.
    """

    DISTRIBUTED_BACKEND = "nccl" if torch.cuda.is_available() else "gloo"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def setUp(self) -> None:
        super().setUp()
        self._setup_pre_spawn()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.testing._internal.common_distributed"])
        self._start_processes(context.Process)

    def _setup_pre_spawn(self) -> None:
        """Called before the processes start; for subclasses."""

    def tearDown(self) -> None:
        torch.cuda.empty_cache()
        super().tearDown()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        gpus = torch.cuda.device_count()
        return min(gpus or int(os.environ.get("WORLD_SIZE", "2")), _MAX_WORLD_SIZE)

    @property
    def init_method(self) -> str:
        """Where the ranks meet."""
        return f"{common_distributed.FILE_SCHEMA}{self.file_name}"

    @property
    def destroy_pg_upon_exit(self) -> bool:
        """False: :meth:`_run` destroys the process group itself."""
        return False

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **_: Any) -> None:
        """Run one test method on one rank."""
        self = cls(test_name)
        self.rank, self.file_name = rank, file_name
        print(f"[dist init] rank = {rank}, world_size = {self.world_size}")
        try:
            dist.init_process_group(
                init_method=self.init_method,
                backend=cls.DISTRIBUTED_BACKEND,
                world_size=int(self.world_size),
                rank=rank,
            )
        except RuntimeError as error:
            if "recompile" in str(error):  # torch was built without this backend
                print(f"Backend {cls.DISTRIBUTED_BACKEND} is not available")
                sys.exit(common_distributed.TEST_SKIPS["backend_unavailable"].exit_code)
            raise
        if torch.cuda.is_available():
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.barrier()
        self.run_test(test_name, pipe)
        dist.barrier()
        dist.destroy_process_group()
        sys.exit(0)


class GlooDistributedTestBase(DistributedTestBase):
    """On gloo, which needs no GPU."""

    DISTRIBUTED_BACKEND = "gloo"


@unittest.skipUnless(torch.cuda.is_available(), "NCCL needs a GPU; DistributedTestBase does not")
class NcclDistributedTestBase(DistributedTestBase):
    """On NCCL."""

    DISTRIBUTED_BACKEND = "nccl"


@unittest.skipUnless(
    HAS_UCC and torch.cuda.is_available() and _has_driver_for_ucc(),
    "UCC needs torch built with it, or torch_ucc, and NVIDIA's driver 470.42.01 or later",
)
class UccDistributedTestBase(DistributedTestBase):
    """On UCC, whose ranks meet at ``MASTER_ADDR`` and ``MASTER_PORT``."""

    DISTRIBUTED_BACKEND = "ucc"
    _DEFAULTS = (
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "12375"),
        ("UCX_TLS", "tcp,cuda"),
    )

    def _setup_pre_spawn(self) -> None:
        self._added = [name for name, _ in self._DEFAULTS if name not in os.environ]
        os.environ.update({name: v for name, v in self._DEFAULTS if name in self._added})

    def tearDown(self) -> None:
        super().tearDown()
        for name in self._added:
            os.environ.pop(name, None)

    @property
    def init_method(self) -> str:
        """Where the ranks meet."""
        return "tcp://localhost:" + os.environ["MASTER_PORT"]
