"""The device of this process and its place among the others."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from options import UsageError


@dataclass(frozen=True)
class Processes:
    """``device`` is this process's; ``rank`` 0 prints and writes files."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def distributed(self) -> bool:
        return self.world_size > 1

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum ``values`` over all processes, in place."""
        if self.distributed:
            dist.all_reduce(values)
        return values

    def copy_from_main(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite ``tensors`` of every process with those of rank 0."""
        if self.distributed:
            for tensor in tensors:
                dist.broadcast(tensor, 0)


def start_processes(local_rank: int) -> Processes:
    """Choose a device and join the process group that ``torch.distributed.run`` describes.

    Raises:
        UsageError: there are more processes than GPUs on this machine.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise UsageError(
                f"--local_rank: process {local_rank} needs a GPU of its own, but this machine has "
                f"{torch.cuda.device_count()}; lower --nproc_per_node."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return Processes(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", init_method="env://")
    return Processes(device, dist.get_rank(), dist.get_world_size())


def stop_processes() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
