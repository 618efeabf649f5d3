"""What a CUDA graph does to a step, on any device: calls are recorded once, and then repeated.

A replay calls every recorded operator again with the same tensors and the same numbers, so that
whatever the host had computed for the recorded step alone shows up as a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS_A_NUMBER = torch.ops.aten._local_scalar_dense.default


class Recording(TorchDispatchMode):
    """The operators that ``step`` calls.

    Args:
        reads_cpu: the step may read numbers from CPU tensors, where a GPU's step would keep them.
    """

    def __init__(self, step: Callable[[], Any], reads_cpu: bool = False) -> None:
        super().__init__()
        self.reads_cpu = reads_cpu
        self.calls: list[tuple] = []
        with self:
            step()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is READS_A_NUMBER and not (self.reads_cpu and args[0].is_cpu):
            raise AssertionError("a step that is captured may not wait for a number of the device")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()  # as the step was
    def replay(self) -> None:
        """Run all calls again; results go where those of the recorded calls are."""
        for func, args, kwargs, before in self.calls:
            after = func(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)
