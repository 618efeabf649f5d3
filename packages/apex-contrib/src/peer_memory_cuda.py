"""Apex's extension module of peer memory: addresses, their handles, and an exchange of edges.

Without a GPU, memory is a file that processes of the host map; see ``apex.contrib.peer_memory``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from apex.contrib.peer_memory import raw as _raw

__all__ = [
    "allocate_raw",
    "blob_view_float",
    "blob_view_half",
    "blob_view_int",
    "free_raw",
    "get_raw_ipc_address",
    "get_raw_peers",
    "push_pull_halos_1d",
    "zero",
]


def _memory() -> Any:
    return _raw.memory_of("cuda" if torch.cuda.is_available() else "cpu")


def allocate_raw(size: int) -> int:
    """The address of ``size`` bytes of zeros."""
    if size < 1:
        raise ValueError(f"allocate_raw: size must be positive, got {size}.")
    return _memory().allocate(size)


def free_raw(ptr: int) -> None:
    """Give memory of :func:`allocate_raw` back."""
    _memory().free(ptr)


def zero(ptr: int, size: int) -> None:
    """Set ``size`` bytes to 0."""
    _memory().zero(ptr, size)


def get_raw_ipc_address(ptr: int) -> Tensor:
    """By what another process opens the memory: uint8 ``[64]`` on the CPU."""
    return torch.frombuffer(bytearray(_memory().handle(ptr)), dtype=torch.uint8)


def get_raw_peers(ipc_addresses: Tensor, peer_rank: int, ptr: int) -> list[int]:
    """Addresses where this process sees all peers' memory.

    Args:
        ipc_addresses: uint8 ``[peers, 64]``, of :func:`get_raw_ipc_address`.
        peer_rank: this process' place among them, whose address is ``ptr``.
    """
    rows = ipc_addresses.cpu()
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != _raw.HANDLE_BYTES:
        raise ValueError(
            f"get_raw_peers: ipc_addresses must be uint8 [peers, {_raw.HANDLE_BYTES}], got "
            f"{rows.dtype} {list(rows.shape)}."
        )
    memory = _memory()
    handles = [bytes(row.tolist()) for row in rows]
    return [ptr if i == peer_rank else memory.open(h) for i, h in enumerate(handles)]


def _blob_view(ptr: int, shape: list[int], channels_last: bool, dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return _raw.view(_memory().bytes_of(ptr, size), shape, dtype, channels_last)


def blob_view_half(ptr: int, shape: list[int], channels_last: bool) -> Tensor:
    """The memory at an address as a float16 tensor."""
    return _blob_view(ptr, shape, channels_last, torch.float16)


def blob_view_float(ptr: int, shape: list[int], channels_last: bool) -> Tensor:
    """The memory at an address as a float32 tensor."""
    return _blob_view(ptr, shape, channels_last, torch.float32)


def blob_view_int(ptr: int, shape: list[int], channels_last: bool) -> Tensor:
    """The memory at an address as an int32 tensor."""
    return _blob_view(ptr, shape, channels_last, torch.int32)


def push_pull_halos_1d(diagnostics: bool, explicit_nhwc: bool, numSM: int, *given: Any) -> None:
    """Copy this rank's edges where neighbours read them, and theirs into its halos.

    All ranks must call it: they wait for each other by ``torch.distributed.barrier``.

    Args:
        diagnostics, explicit_nhwc, numSM: of Apex's kernel; not used.
        given: NVIDIA's or ROCm's arguments. NVIDIA's are ``peer_rank``, and then for the top and
            the bottom ``zero, out_halo, pushed, pulled, inp_halo``: whether there is no
            neighbour, the edge, the tensor it is copied to, the tensor the neighbour's edge is
            copied from, and the halo. ROCm's are these ten, and three of its signals.
    """
    ten = given[1:] if len(given) == 11 else given[:10]
    if len(given) not in (11, 13):
        raise TypeError(
            f"push_pull_halos_1d: takes 14 arguments, as NVIDIA's, or 16, as ROCm's; got "
            f"{3 + len(given)}."
        )
    with torch.no_grad():
        for _, edge, pushed, _, _ in (ten[:5], ten[5:]):
            pushed.copy_(edge.reshape(pushed.shape))
        _wait_for_all()
        for is_end, _, _, pulled, halo in (ten[:5], ten[5:]):
            halo.zero_() if is_end else halo.copy_(pulled.reshape(halo.shape))
        _wait_for_all()  # before anybody pushes again


def _wait_for_all() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
