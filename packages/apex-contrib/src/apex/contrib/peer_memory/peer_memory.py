"""PeerMemoryPool: memory that the ranks of one host see of each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .raw import memory_of, view

__all__ = ["PeerMemoryPool"]

_ALIGNMENT = 256  # bytes
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class PeerMemoryPool:
    """One block of memory of each rank, in which all ranks have views of all blocks.

    Args:
        static_size, dynamic_size: bytes of tensors that stay, and of those that :meth:`reset`
            gives back; rounded up to multiples of 256.
        peer_ranks: global ranks that share the pool, all on one host; None for all. They must
            call it together. Other ranks must call it too, if there is a pool of theirs.
        device: "cuda" or "cpu"; None for "cuda" where there is a GPU. A CPU's block is a file in
            memory, a GPU's is shared by CUDA's or HIP's IPC.

    Attributes:
        peer_ranks: the ranks; peer_rank: this rank's place in them.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialized, there is no GPU, or a peer's memory
            cannot be opened.
        ValueError: this rank is not in ``peer_ranks``, or a size is negative.

    Example:
        >>> pool = PeerMemoryPool(0, 1 << 20, device="cpu")  # doctest: +SKIP
        >>> mine, theirs = pool.allocate_peer_tensors([2, 8], torch.float32, False, True)
    """

    def __init__(
        self,
        static_size: int,
        dynamic_size: int,
        peer_ranks: Sequence[int] | None = None,
        device: str | None = None,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "PeerMemoryPool: torch.distributed is not initialized; call "
                "torch.distributed.init_process_group() first."
            )
        if min(static_size, dynamic_size) < 0 or static_size + dynamic_size < 1:
            raise ValueError(
                "PeerMemoryPool: static_size and dynamic_size must not be negative, and not both "
                f"0; got {static_size} and {dynamic_size}."
            )
        self.peer_ranks = list(range(dist.get_world_size()) if peer_ranks is None else peer_ranks)
        if dist.get_rank() not in self.peer_ranks:
            raise ValueError(
                f"PeerMemoryPool: rank {dist.get_rank()} is not in peer_ranks {self.peer_ranks}."
            )
        self.peer_rank = self.peer_ranks.index(dist.get_rank())
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._memory = memory_of(self.device)
        self.static_size, self.dynamic_size = _aligned(static_size), _aligned(dynamic_size)
        self.static_offset, self.dynamic_offset = 0, self.static_size
        self._address = self._memory.allocate(self._size)
        self._blocks = self._open_all()

    @property
    def _size(self) -> int:
        return self.static_size + self.dynamic_size

    def _open_all(self) -> list[Tensor]:
        """All ranks' blocks as bytes."""
        handles: list[tuple[int, bytes]] = [(0, b"")] * dist.get_world_size()
        dist.all_gather_object(handles, (self._size, self._memory.handle(self._address)))
        for rank in self.peer_ranks:
            if handles[rank][0] != self._size:
                raise ValueError(
                    f"PeerMemoryPool: rank {rank} asks for {handles[rank][0]} bytes, this rank for "
                    f"{self._size}; all must ask for the same."
                )
        self._addresses = [
            self._address if rank == dist.get_rank() else self._memory.open(handles[rank][1])
            for rank in self.peer_ranks
        ]
        dist.barrier()  # nobody frees what another is about to open
        return [self._memory.bytes_of(address, self._size) for address in self._addresses]

    def reset(self) -> None:
        """Give the dynamic part back; its tensors must not be used any more."""
        self.dynamic_offset = self.static_size

    def allocate_peer_tensors(
        self, shape: Sequence[int], dtype: torch.dtype, channels_last: bool, dynamic: bool
    ) -> list[Tensor]:
        """One tensor in each rank's block, at the same place; the ranks must call it together.

        Args:
            shape: of the tensors; ``[N, C, H, W]`` with ``channels_last``, which is their format.
            dtype: float64, float32, float16, bfloat16 or int32.
            dynamic: in the part that :meth:`reset` gives back.

        Raises:
            TypeError: another dtype.
            ValueError: the part has too little memory left; it keeps what it has.
        """
        if dtype not in _DTYPES:
            names = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
            raise TypeError(f"allocate_peer_tensors: dtype must be one of {names}; got {dtype}.")
        size = _aligned(math.prod(shape) * dtype.itemsize)
        begin = self.dynamic_offset if dynamic else self.static_offset
        end = self._size if dynamic else self.static_size
        if begin + size > end:
            part = "dynamic" if dynamic else "static"
            raise ValueError(
                f"allocate_peer_tensors: {list(shape)} {dtype} takes {size} bytes, but the {part} "
                f"part has {end - begin} left; make the pool with a larger {part}_size, or call "
                "reset()."
            )
        tensors = [view(block[begin:], shape, dtype, channels_last) for block in self._blocks]
        if dynamic:
            self.dynamic_offset = begin + size
        else:
            self.static_offset = begin + size
        return tensors

    def __del__(self) -> None:
        if "_blocks" in self.__dict__:
            self._blocks.clear()
        for address in self.__dict__.get("_addresses", ()):
            if address != self._address:
                self._memory.close(address)
        if "_address" in self.__dict__:
            self._memory.free(self._address)
