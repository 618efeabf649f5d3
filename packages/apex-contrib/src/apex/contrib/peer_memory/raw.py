"""Memory by address, which another process of the host opens by a handle of 64 bytes.

On a CPU it is a file in memory, on a GPU what CUDA's or HIP's IPC functions share. Those are called
in the runtime library that torch has loaded.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["DeviceMemory", "HostMemory", "memory_of", "view"]

HANDLE_BYTES = 64  # of CUDA and HIP


class HostMemory:
    """Files that processes map; a file disappears with the process that made it, at the latest."""

    def __init__(self) -> None:
        self._maps: dict[int, tuple[mmap.mmap, Any, Path | None]] = {}

    def allocate(self, size: int) -> int:
        """The address of ``size`` bytes of zeros."""
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        descriptor, path = tempfile.mkstemp(prefix="apex-", dir=folder)
        os.ftruncate(descriptor, size)
        return self._map(descriptor, size, Path(path))

    def handle(self, address: int) -> bytes:
        """What :meth:`open` takes, in another process."""
        path = os.fsencode(str(self._entry(address)[2]))
        if len(path) > HANDLE_BYTES:
            raise ValueError(f"peer_memory: the path {path!r} has more than {HANDLE_BYTES} bytes.")
        return path.ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        """The address where this process sees another's memory."""
        path = os.fsdecode(handle.rstrip(b"\0"))
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            raise RuntimeError(
                f"peer_memory: cannot open {path}, a peer's memory: {error}. Peers must be on one "
                "host, and keep their memory until all have opened it."
            ) from error
        return self._map(descriptor, os.fstat(descriptor).st_size, None)

    def free(self, address: int) -> None:
        """Forget an address; its memory lasts as long as tensors see it."""
        _, _, path = self._entry(address)
        del self._maps[address]
        if path is not None:
            path.unlink(missing_ok=True)

    def close(self, address: int) -> None:
        """Forget another process' memory."""
        self.free(address)

    def zero(self, address: int, size: int) -> None:
        ctypes.memset(address, 0, size)

    def bytes_of(self, address: int, size: int) -> Tensor:
        """A uint8 tensor of the memory, which it keeps."""
        for start, (mapped, _, _) in self._maps.items():
            if start <= address and address + size <= start + len(mapped):
                return torch.frombuffer(mapped, dtype=torch.uint8)[address - start :][:size]
        raise ValueError(f"peer_memory: no {size} bytes were allocated at {address:#x}.")

    def _map(self, descriptor: int, size: int, path: Path | None) -> int:
        mapped = mmap.mmap(descriptor, size)
        os.close(descriptor)
        start = ctypes.c_char.from_buffer(mapped)
        self._maps[ctypes.addressof(start)] = mapped, start, path
        return ctypes.addressof(start)

    def _entry(self, address: int) -> tuple[mmap.mmap, Any, Path | None]:
        if address not in self._maps:
            raise ValueError(f"peer_memory: nothing was allocated at {address:#x}.")
        return self._maps[address]

    def __del__(self) -> None:
        for _, _, path in self.__dict__.get("_maps", {}).values():
            if path is not None:
                path.unlink(missing_ok=True)


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_byte * HANDLE_BYTES),)


class DeviceMemory:
    """A GPU's memory, by CUDA's or HIP's own functions."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("peer_memory: no GPU is available to torch; use device='cpu'.")
        self._library, self._prefix = _runtime_library()

    def _call(self, name: str, *given: Any) -> None:
        torch.cuda.current_stream()  # makes the device's context
        status = getattr(self._library, self._prefix + name)(*given)
        if status:
            raise RuntimeError(
                f"peer_memory: {self._prefix}{name} failed with error {status} on cuda:"
                f"{torch.cuda.current_device()}. Peers must be GPUs of one host that can access "
                "each other."
            )

    def allocate(self, size: int) -> int:
        address = ctypes.c_void_p()
        self._call("Malloc", ctypes.byref(address), ctypes.c_size_t(size))
        self.zero(address.value or 0, size)
        return address.value or 0

    def handle(self, address: int) -> bytes:
        handle = _Handle()
        self._call("IpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_void_p()
        lazily = ctypes.c_uint(1)  # IpcMemLazyEnablePeerAccess
        given = ctypes.byref(address), _Handle.from_buffer_copy(handle), lazily
        self._call("IpcOpenMemHandle", *given)
        return address.value or 0

    def free(self, address: int) -> None:
        self._call("Free", ctypes.c_void_p(address))

    def close(self, address: int) -> None:
        """Forget another process' memory; tensors of it must not be used any more."""
        self._call("IpcCloseMemHandle", ctypes.c_void_p(address))

    def zero(self, address: int, size: int) -> None:
        self._call("Memset", ctypes.c_void_p(address), 0, ctypes.c_size_t(size))
        torch.cuda.synchronize()

    def bytes_of(self, address: int, size: int) -> Tensor:
        """A uint8 tensor of the memory, which lasts until it is freed."""
        array = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}
        seen = type("Memory", (), {"__cuda_array_interface__": array})()
        return torch.as_tensor(seen, device="cuda")


def _runtime_library() -> tuple[ctypes.CDLL, str]:
    """CUDA's or HIP's runtime, and how the names of its functions begin."""
    major = (torch.version.cuda or "").partition(".")[0]
    names = ["libamdhip64.so"] if torch.version.hip else [f"libcudart.so.{major}", "libcudart.so"]
    for name in names:
        try:
            return ctypes.CDLL(name), "hip" if torch.version.hip else "cuda"
        except OSError:
            continue
    raise RuntimeError(f"peer_memory: torch has loaded none of {', '.join(names)}.")


# No lock: pools, the first callers, are made by collective calls, in one thread.
@functools.cache
def memory_of(device_type: str) -> HostMemory | DeviceMemory:
    """The one object of a kind of device; "cpu" or "cuda"."""
    return HostMemory() if device_type == "cpu" else DeviceMemory()


def view(data: Tensor, shape: Sequence[int], dtype: torch.dtype, channels_last: bool) -> Tensor:
    """The first bytes of ``data`` as a tensor.

    With ``channels_last``, ``shape`` is ``[N, C, H, W]`` in that memory format.
    """
    size = math.prod(shape) * dtype.itemsize
    typed = data[:size].view(dtype)
    if not channels_last:
        return typed.view(*shape)
    if len(shape) != 4:
        raise ValueError(f"peer_memory: channels_last needs 4 dimensions, got {list(shape)}.")
    n, c, h, w = shape
    return typed.view(n, h, w, c).permute(0, 3, 1, 2)
