"""Apex's extension module of exchanges between neighbours, over ``torch.distributed``.

NCCL or RCCL carry them on GPUs, gloo on CPUs: what the process group of the world has.
"""

from __future__ import annotations

import secrets
import time

import torch
import torch.distributed as dist
from torch import Tensor

from apex.contrib.peer_memory.halos import exchange as _exchange

__all__ = [
    "add_delay",
    "get_unique_nccl_id",
    "init_nccl_comm",
    "left_right_halo_exchange",
    "left_right_halo_exchange_inplace",
]

# By handle: the global rank of each member. No lock: a collective call makes them, in one thread.
_communicators: list[list[int]] = []


def get_unique_nccl_id(n: int) -> Tensor:
    """Names of ``n`` communicators to be: random uint8 ``[n, 128]`` on the CPU."""
    if n < 1:
        raise ValueError(f"get_unique_nccl_id: n must be positive, got {n}.")
    data = bytearray(secrets.token_bytes(128 * n))
    return torch.frombuffer(data, dtype=torch.uint8).view(n, 128)


def init_nccl_comm(unique_nccl_id: Tensor, my_rank: int, num_ranks: int) -> int:
    """A handle of the communicator of a name, for this process' calls.

    All ranks of the world must call it together, each with the name of its own communicator.

    Args:
        unique_nccl_id: 128 bytes of :func:`get_unique_nccl_id`, the same for all its members.
        my_rank, num_ranks: this rank's place in it, and how many there are.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialized.
        ValueError: the members' places are not 0 to ``num_ranks - 1``.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "init_nccl_comm: torch.distributed is not initialized; call "
            "torch.distributed.init_process_group() first."
        )
    name = bytes(unique_nccl_id.flatten()[:128].tolist())
    everybody: list[tuple[bytes, int]] = [(b"", 0)] * dist.get_world_size()
    dist.all_gather_object(everybody, (name, my_rank))
    members = {place: rank for rank, (of, place) in enumerate(everybody) if of == name}
    if sorted(members) != list(range(num_ranks)):
        raise ValueError(
            f"init_nccl_comm: a communicator of {num_ranks} ranks needs the places 0 to "
            f"{num_ranks - 1}, but its ranks gave {sorted(members)}."
        )
    _communicators.append([members[place] for place in range(num_ranks)])
    return len(_communicators) - 1


def left_right_halo_exchange(
    handle: int,
    left_rank: int,
    right_rank: int,
    left_output_halo: Tensor,
    right_output_halo: Tensor,
) -> list[Tensor]:
    """Send an edge to each neighbour; return what they send, and zeros for a negative rank.

    ``left_rank`` and ``right_rank`` are places in the communicator of :func:`init_nccl_comm`.
    """
    if not 0 <= handle < len(_communicators):
        raise ValueError(f"left_right_halo_exchange: {handle} is no handle of init_nccl_comm.")
    members = _communicators[handle]
    for argument, place in (("left_rank", left_rank), ("right_rank", right_rank)):
        if place >= len(members):
            raise ValueError(
                f"left_right_halo_exchange: {argument} must be below {len(members)}, got {place}."
            )
    left, right = (members[place] if place >= 0 else -1 for place in (left_rank, right_rank))
    return list(_exchange(left, right, left_output_halo, right_output_halo))


def left_right_halo_exchange_inplace(
    handle: int,
    left_rank: int,
    right_rank: int,
    left_output_halo: Tensor,
    right_output_halo: Tensor,
    left_input_halo: Tensor,
    right_input_halo: Tensor,
) -> None:
    """The same, into the last two tensors."""
    given = handle, left_rank, right_rank, left_output_halo, right_output_halo
    came = left_right_halo_exchange(*given)
    left_input_halo.copy_(came[0])
    right_input_halo.copy_(came[1])


def add_delay(delay: int) -> None:
    """Keep the current stream busy for ``delay`` microseconds; without a GPU, wait."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        kilohertz = getattr(properties, "clock_rate", 1_500_000)
        torch.cuda._sleep(int(delay * kilohertz / 1000))
    else:
        time.sleep(delay / 1e6)
