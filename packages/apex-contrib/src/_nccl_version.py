"""Apex's module that tells the version of NCCL, or RCCL, that torch has."""

import torch

__all__ = ["get_nccl_version"]


def get_nccl_version() -> tuple[int, int]:
    """``(major, minor)``.

    Raises:
        RuntimeError: torch was built without NCCL.
    """
    if not torch.distributed.is_nccl_available():
        raise RuntimeError(
            f"get_nccl_version: torch {torch.__version__} was built without NCCL; install a torch "
            "for CUDA or ROCm."
        )
    return torch.cuda.nccl.version()[:2]
