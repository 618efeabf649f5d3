"""The device on which parameters, buffers and received tensors are made."""

from __future__ import annotations

import torch
import torch.distributed as dist


def current_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """The current GPU; the CPU where there is none, or where the group uses gloo.

    The group is by default that of all ranks.
    """
    is_gloo = dist.is_available() and dist.is_initialized() and dist.get_backend(group) == "gloo"
    if is_gloo or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
