"""Memory pools over NCCL's or RCCL's allocator, which torch's NCCL backend brings."""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

__all__ = ["create_nccl_mem_pool", "init", "nccl_mem"]


def init() -> None:
    """Set the environment that NCCL reads when it starts: call it before the first collective.

    ``NCCL_NVLS_ENABLE`` becomes 1, and ``TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK`` 0. It
    warns where NCCL's process group is made already, which may have read them.
    """
    os.environ["NCCL_NVLS_ENABLE"] = "1"
    os.environ["TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"] = "0"
    if dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend():
        warnings.warn(
            "nccl_allocator.init: an NCCL process group exists already, and may have read its "
            "environment; call init() before torch.distributed.init_process_group().",
            RuntimeWarning,
            stacklevel=2,
        )


def get_func_args(func: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters."""
    return list(inspect.signature(func).parameters)


def _device(device: torch.device | int | str | None) -> torch.device:
    if isinstance(device, int):
        return torch.device("cuda", device)
    return torch.device("cuda" if device is None else device)


def backend(
    name: str, group: dist.ProcessGroup | None, device: torch.device | int | str | None
) -> Any:
    """The NCCL backend of a process group; None for the world's.

    Raises:
        RuntimeError: there is no GPU, or the group has no NCCL backend.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(f"{name}: needs a GPU, and torch {torch.__version__} finds none.")
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{name}: torch.distributed is not initialized; call "
            "torch.distributed.init_process_group('nccl') first."
        )
    of = _device(device)
    found = (group or dist.group.WORLD)._get_backend(of)
    if not hasattr(found, "register_mem_pool"):
        raise RuntimeError(
            f"{name}: the process group's backend for {of} is {type(found).__name__}, which has no "
            "memory pools; use nccl."
        )
    return found


def allocator(
    name: str, group: dist.ProcessGroup | None, device: torch.device | int | str | None
) -> Any:
    """The allocator of :func:`backend`, for ``torch.cuda.MemPool``."""
    return backend(name, group, device).mem_allocator


def create_nccl_mem_pool(symmetric: bool | None = None) -> Any:
    """A ``torch.cuda.MemPool`` whose memory comes from NCCL's allocator.

    Args:
        symmetric: register the memory as symmetric, where torch's MemPool can; None for its
            default.

    Raises:
        RuntimeError: there is no GPU, or no NCCL process group.
        ValueError: this torch's MemPool knows nothing of symmetric memory.
    """
    options: dict[str, bool] = {}
    if symmetric is not None:
        names = get_func_args(torch.cuda.MemPool.__init__)
        known = [argument for argument in ("symmetric", "symm_mem") if argument in names]
        if not known:
            raise ValueError(
                f"create_nccl_mem_pool: symmetric is {symmetric}, but MemPool of torch "
                f"{torch.__version__} has no such argument; pass None."
            )
        options[known[0]] = symmetric
    return torch.cuda.MemPool(allocator("create_nccl_mem_pool", None, None), **options)


class nccl_mem:
    """Within it, a GPU's memory is allocated from a pool, which is registered with NCCL at its end.

    Args:
        pool: of :func:`create_nccl_mem_pool`.
        enabled: False: do nothing.
        device: whose allocations; None for the current one.
        group: whose collectives use the memory; None for the world.

    Raises:
        RuntimeError: when it is entered: there is no GPU, or the group has no NCCL backend.

    Example:
        >>> pool = create_nccl_mem_pool()  # doctest: +SKIP
        >>> with nccl_mem(pool):
        ...     buffer = torch.empty(1 << 20, device="cuda")
    """

    _registered: ClassVar[set[tuple[int, Any]]] = set()  # backend, pool

    def __init__(
        self,
        pool: Any,
        enabled: bool = True,
        device: torch.device | int | str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.pool, self.enabled, self.device, self.group = pool, enabled, device, group
        self._open = contextlib.ExitStack()

    def __enter__(self) -> None:
        if not self.enabled:
            return
        self._backend = backend("nccl_mem", self.group, self.device)
        self._key = id(self._backend), self.pool.id
        if self._key in self._registered:  # it gets segments that are not registered yet
            self._backend.deregister_mem_pool(self.pool)
            self._registered.discard(self._key)
        device = None if self.device is None else _device(self.device)
        if device is not None:
            self._open.enter_context(torch.cuda.device(device))
        self._open.enter_context(torch.cuda.use_mem_pool(self.pool, device))

    def __exit__(self, *args: Any) -> None:
        if not self.enabled:
            return
        self._open.close()
        self._backend.register_mem_pool(self.pool)
        self._registered.add(self._key)
