"""The test cases of :mod:`apex.distributed_testing`, where ROCm's Apex has them."""

from typing import Any

from ...distributed_testing import distributed_test_base as _home
from ...distributed_testing._ucc_util import HAS_UCC as HAS_TORCH_UCC
from ...distributed_testing.distributed_test_base import (
    DistributedTestBase,
    GlooDistributedTestBase,
    NcclDistributedTestBase,
    UccDistributedTestBase,
)

__all__ = [
    "HAS_TORCH_UCC",
    "HAS_TORCH_UCC_COMPAT_NVIDIA_DRIVER",  # noqa: F822  (in __getattr__)
    "DistributedTestBase",
    "GlooDistributedTestBase",
    "NcclDistributedTestBase",
    "UccDistributedTestBase",
]


def __getattr__(name: str) -> Any:
    if name == "HAS_TORCH_UCC_COMPAT_NVIDIA_DRIVER":
        return _home.HAS_TORCH_UCC_COMPAT_NVIDIA_DRIVER
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
