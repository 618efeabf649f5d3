"""Collectives over the groups of a distributed optimizer, as each backend does them best."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

AVERAGING = ("gloo", "nccl")  # backends with ReduceOp.AVG
BLOCK = 1 << 16  # elements that are added and divided while they are in a cache
# Newer names of all_gather_into_tensor and reduce_scatter_tensor, which warn where these exist.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def check_initialized(owner: str) -> None:
    """Raise RuntimeError where torch.distributed is not initialized."""
    if not dist.is_initialized():
        raise RuntimeError(
            f"{owner}: torch.distributed is not initialized. Call "
            "torch.distributed.init_process_group first, and start the script with torchrun."
        )


class Groups:
    """The process groups of a distributed optimizer.

    Args:
        process_group: all ranks with the same parameters; by default all.
        distributed: over which the state is divided; by default ``process_group``.
        redundant: ranks that hold the same shard; by default this rank alone.

    Raises:
        RuntimeError: their sizes do not multiply, or there is no process group.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        distributed: dist.ProcessGroup | None,
        redundant: dist.ProcessGroup | None,
        owner: str,
    ) -> None:
        check_initialized(owner)
        self.all = dist.group.WORLD if process_group is None else process_group
        self.distributed = self.all if distributed is None else distributed
        self.redundant = redundant
        self.size = dist.get_world_size(self.all)
        self.shards = dist.get_world_size(self.distributed)
        self.copies = 1 if redundant is None else dist.get_world_size(redundant)
        if self.size != self.shards * self.copies:
            raise RuntimeError(
                f"{owner}: process_group has {self.size} ranks, expected the product of "
                f"distributed_process_group ({self.shards}) and redundant_process_group "
                f"({self.copies})."
            )
        self.rank = dist.get_rank(self.all)
        self.shard = dist.get_rank(self.distributed)
        self.copy = 0 if redundant is None else dist.get_rank(redundant)
        if min(self.rank, self.shard, self.copy) < 0:
            raise RuntimeError(
                f"{owner}: this process, rank {dist.get_rank()}, is not in every process group "
                "that was given. Give each process the groups that it belongs to."
            )

    @property
    def root(self) -> int:
        """The global rank of the first process."""
        return dist.get_global_rank(self.all, 0)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that moves tensors of a device: ``gloo``, ``nccl``, ``mpi`` or another."""
    return group._get_backend(device).name().lower()


class Works:
    """Works of collectives that are to be waited for together."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def append(self, work: Any) -> None:
        """Note a work; None is ignored."""
        if work is not None:
            self.works.append(work)

    def wait(self) -> None:
        """Wait for all works noted so far."""
        while self.works:
            self.works.pop(0).wait()


class Reduction:
    """A bucket's sum or average over all ranks under way; :meth:`wait` gives this rank's shard.

    gloo's reduce_scatter is an all_reduce underneath, which moves twice as much as is needed. On
    CPUs each rank gets the parts of its shard by all_to_all instead, and adds them up in the order
    of ranks and in float32. So a sum has the same bits wherever it lies in a bucket. Between two
    processes of one machine 16 MB take 18 ms instead of 27.

    Args:
        bucket: consumed; of equal shards.
        average: over all ranks; else the sum.
        divide_first: divide before the sum, and sum, where the backend's average must not be used.
    """

    def __init__(
        self, bucket: Tensor, groups: Groups, average: bool, divide_first: bool = False
    ) -> None:
        self._works = Works()
        self._parts: list[Tensor] = []  # of all ranks, which are still to be added up
        self._divisor = groups.size if average else 1
        self.has_own_memory = False  # the shard; else it is a part of the bucket
        self._shard = bucket.split(bucket.numel() // groups.shards)[groups.shard]
        if groups.size == 1:
            return
        backend = backend_of(groups.all, bucket.device)
        if backend == "gloo" and bucket.device.type == "cpu" and groups.copies == 1:
            parts = torch.empty_like(bucket)
            raw = parts.view(torch.uint8), bucket.view(torch.uint8)  # gloo refuses some dtypes
            self._works.append(dist.all_to_all_single(*raw, group=groups.all, async_op=True))
            self._parts = list(parts.split(self._shard.numel()))
            self._shard, self.has_own_memory = torch.empty_like(self._shard), True
            return
        operation = dist.ReduceOp.SUM
        if average and (divide_first or backend not in AVERAGING):
            bucket.div_(groups.size)
        elif average:
            operation = dist.ReduceOp.AVG
        if backend == "gloo":  # whose reduce_scatter spends most of its time before it returns
            self._works.append(dist.all_reduce(bucket, operation, groups.all, async_op=True))
            return
        if groups.shards > 1:
            self._shard, self.has_own_memory = torch.empty_like(self._shard), True
            work = reduce_scatter_single(
                self._shard, bucket, operation, groups.distributed, async_op=True
            )
            self._works.append(work)
        if groups.copies > 1:
            self._works.wait()  # NCCL: orders streams
            work = dist.all_reduce(self._shard, operation, groups.redundant, async_op=True)
            self._works.append(work)

    def wait(self) -> Tensor:
        """This rank's shard: a part of the bucket's memory, or memory of its own."""
        self._works.wait()
        if self._parts:
            add_up(self._shard, self._parts, self._divisor)
            self._parts = []
        return self._shard


def add_up(out: Tensor, parts: Sequence[Tensor], divisor: int) -> None:
    """Write the sum of ``parts`` over ``divisor``, added in their order and in float32."""
    blocks = zip(out.split(BLOCK), *(part.split(BLOCK) for part in parts), strict=True)
    for target, first, second, *others in blocks:
        if target.dtype == torch.float32:
            total = torch.add(first, second, out=target)
        else:
            total = first.float().add_(second)
        for other in others:
            total.add_(other)
        if divisor > 1:
            total.div_(divisor)
        if total is not target:
            target.copy_(total)


def all_gather(out: Tensor, shard: Tensor, groups: Groups) -> Works:
    """Start to gather equal shards, and return what to wait for.

    Bytes are sent, because gloo refuses some dtypes. ``shard`` may be its own part of ``out``.
    gloo's all_gather copies all that it has received once more. Two ranks broadcast instead: on one
    machine 16 MB take 6.6 ms of processor time, and not 11. Not more ranks: when one of them dies,
    others of a broadcast's tree learn of it by the timeout only.
    """
    works, group, parts = Works(), groups.distributed, out.split(shard.numel())
    raw = shard.view(torch.uint8)
    if groups.shards == 2 and backend_of(group, out.device) == "gloo":
        for rank, part in enumerate(parts):
            message = raw if rank == groups.shard else part.view(torch.uint8)
            works.append(dist.broadcast(message, group=group, group_src=rank, async_op=True))
    elif groups.shards > 1:
        works.append(all_gather_single(out.view(torch.uint8), raw, group, async_op=True))
        return works
    if parts[groups.shard].data_ptr() != shard.data_ptr():
        parts[groups.shard].copy_(shard)
    return works


def broadcast(tensors: Sequence[Tensor], groups: Groups, limit_bytes: int = 25 << 20) -> None:
    """Overwrite tensors by those of the first rank, several in one message.

    Args:
        tensors: dense; the same shapes and dtypes on all ranks.
    """
    if groups.size == 1:
        return
    batch: list[Tensor] = []

    def send() -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in batch])
        dist.broadcast(flat.view(torch.uint8), groups.root, groups.all)
        parts = flat.split([tensor.numel() for tensor in batch])
        for tensor, part in zip(batch, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
        batch.clear()

    size = 0
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        if batch and (kind != (batch[0].dtype, batch[0].device) or size >= limit_bytes):
            send()
            size = 0
        if tensor.numel():
            batch.append(tensor)
            size += tensor.numel() * tensor.element_size()
    if batch:
        send()


def check_alike(facts: Any, what: str, groups: Groups, device: torch.device, owner: str) -> None:
    """Compare what all ranks must have alike, by a hash.

    Args:
        facts: anything whose ``repr`` says it.
        what: its name for the message.

    Raises:
        RuntimeError: on every rank, if some rank has another.
    """
    odd = odd_ranks(facts, groups.all, device)
    if odd:
        raise RuntimeError(
            f"{owner}: ranks {odd} of process_group differ from rank 0 in {what}. All ranks must "
            "build the same model and give the optimizer the same arguments, in the same order."
        )


def odd_ranks(facts: Any, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Ranks of a group whose facts have another ``repr`` than rank 0's; a collective call."""
    size = dist.get_world_size(group)
    if size == 1:
        return []
    digest = hashlib.sha256(repr(facts).encode()).digest()[:7]
    mine = torch.tensor([int.from_bytes(digest, "little")], device=device)
    every = mine.new_empty(size)
    all_gather_single(every, mine, group)
    numbers = every.tolist()
    return [rank for rank, number in enumerate(numbers) if number != numbers[0]]


def refuse_together(
    error: Exception | None, group: dist.ProcessGroup, device: torch.device, where: str
) -> None:
    """Raise on every rank if some rank has to, so that none waits for it; a collective call.

    Args:
        error: why this rank refuses; None if it does not.
        where: which call it is, for the message of the other ranks.

    Raises:
        Exception: ``error``.
        RuntimeError: another rank has one.
    """
    size, refusing = dist.get_world_size(group), []
    if size > 1:
        mine = torch.tensor([error is not None], dtype=torch.uint8, device=device)
        every = mine.new_empty(size)
        all_gather_single(every, mine, group)
        refusing = [rank for rank, flag in enumerate(every.tolist()) if flag]
    if error is not None:
        raise error
    if refusing:
        raise RuntimeError(
            f"{where}: ranks {refusing} of the process group refused this call; their errors say "
            "why. Nothing has changed on this rank."
        )


def load_together(
    check: Callable[[], tuple[Any, Callable[[], None]]],
    group: dist.ProcessGroup,
    device: torch.device,
    where: str,
) -> None:
    """Take a state on all ranks, or on none; a collective call.

    Args:
        check: without collectives, and changing nothing, looks whether the state fits. It returns
            what must be alike on all ranks, and what takes the state.
        where: the name of the call.

    Raises:
        ValueError: this rank's state cannot be read.
        RuntimeError: another rank refuses its state, or has one of another step.
    """
    error, facts, take = None, None, None
    try:
        facts, take = check()
    except Exception as failure:
        error = failure
        if not str(failure).startswith(where.partition(".")[0]):  # not in words of ours
            error = ValueError(f"{where}: the state cannot be read, it is damaged: {failure!r}")
            error.__cause__ = failure
    refuse_together(error, group, device, where)
    if odd := odd_ranks(facts, group, device):
        raise RuntimeError(
            f"{where}: the states of ranks {odd} of the process group are of another step or "
            "format than that of rank 0. Load the same checkpoint on all ranks. Nothing has "
            "changed."
        )
    take()


def on_stream(owner: Any, index: int, *reads: Tensor) -> Any:
    """Context: work goes to a side stream of an accelerator, behind what is queued now.

    Args:
        owner: has ``streams``, none on CPUs, and their ``device``.
    """
    if not owner.streams:
        return nullcontext()
    module = torch.get_device_module(owner.device)
    stream = owner.streams[index % len(owner.streams)]
    stream.wait_stream(module.current_stream())
    for tensor in reads:
        tensor.record_stream(stream)
    return module.stream(stream)


def join_stream(owner: Any, index: int, *results: Tensor) -> None:
    """Make the current stream wait for a side stream, whose results it will read."""
    if owner.streams:
        current = torch.get_device_module(owner.device).current_stream()
        current.wait_stream(owner.streams[index % len(owner.streams)])
        for tensor in results:
            tensor.record_stream(current)


@contextmanager
def _coalescing_manager(
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    async_ops: bool = False,
) -> Iterator[Works]:
    """Group collectives: torch's way on NCCL, and elsewhere by keeping their works.

    torch's own raises with gloo, and leaves the group in a state in which collectives do nothing.

    Args:
        async_ops: the caller waits, by ``wait()`` of what this yields; else the end of the block.
    """
    group = dist.group.WORLD if group is None else group
    device = torch.device("cpu") if device is None else torch.device(device)
    manager = Works()
    if device.type != "cpu" and backend_of(group, device) == "nccl":
        native = getattr(dist.distributed_c10d, "_coalescing_manager")  # noqa: B009  (private)
        with native(group=group, device=device, async_ops=async_ops) as inner:
            yield manager
        if async_ops:
            manager.append(inner)
        return
    yield manager
    if not async_ops:
        manager.wait()


def _coalescing_manager_append_work(manager: Works, work: Any) -> None:
    """Have ``manager`` wait for a work, too."""
    manager.append(work)
