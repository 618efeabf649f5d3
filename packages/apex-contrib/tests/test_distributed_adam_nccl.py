"""``nccl_ub`` without NCCL: what is asked of it, and in which order.

What only GPUs over NCCL show is not here: that memory is registered, that collectives then need no
copy, and how much time that saves.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from apex.contrib import nccl_allocator
from apex.contrib.optimizers.distributed import arguments, buffers
from apex.contrib.optimizers.distributed.collectives import Groups, Reduction


def test_buffers_come_from_one_pool_of_the_group_that_reduces(monkeypatch):
    calls = []

    @contextlib.contextmanager
    def nccl_mem(pool, device, group):
        calls.append(("within", pool, device, group))
        yield
        calls.append("registered")

    monkeypatch.setattr(nccl_allocator, "nccl_mem", nccl_mem)
    monkeypatch.setattr(nccl_allocator, "create_nccl_mem_pool", lambda: calls.append("pool") or 7)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: calls.append(a) or zeros(*a, **k))
    half = SimpleNamespace(grad_sync_dtype=torch.bfloat16, bucket_size=64)
    single = SimpleNamespace(grad_sync_dtype=torch.float32, bucket_size=32)
    optimizer = SimpleNamespace(
        nccl_ub=True,
        nccl_pool=None,
        device=torch.device("cpu"),
        distributed_process_group="group",
        _grad_buffers={},
        state={"buckets": [single, half, single]},
    )
    found = [buffers.grad_buffer_of(optimizer, index) for index in range(3)]
    assert [(f.numel(), f.dtype) for f in found] == [
        (32, torch.float32),
        (64, torch.bfloat16),
        (32, torch.float32),
    ]
    within = ("within", 7, optimizer.device, "group")
    assert calls == ["pool", within, (64,), "registered", within, (64,), "registered"]
    assert optimizer.nccl_pool == 7


def check_average(rank, world):
    """Divided by all ranks, not only by those that share the state (which Apex does)."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = Groups(None, pairs[rank // 2], across[rank % 2], "test")
    bucket = torch.arange(8.0) * (rank + 1)
    shard = Reduction(bucket, groups, average=True, divide_first=True).wait()
    whole = torch.arange(8.0) * 2.5
    assert torch.equal(shard, whole[4 * (rank % 2) : 4 * (rank % 2) + 4])


def test_average_is_over_all_ranks(four_ranks):
    four_ranks(check_average)


def given(**options):
    names = ("process_group", "distributed_process_group")
    return {"nccl_ub": True, "contiguous_grad_buffer": True, **dict.fromkeys(names), **options}


def test_errors(monkeypatch):
    gpu = torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match="nccl_ub=True needs contiguous_grad_buffer=True"):
        arguments.check_nccl_ub(given(contiguous_grad_buffer=False), gpu)
    with pytest.raises(RuntimeError, match=r"needs parameters on a GPU.* got cpu. Leave it out"):
        arguments.check_nccl_ub(given(), torch.device("cpu"))
    arguments.check_nccl_ub(given(nccl_ub=False), torch.device("cpu"))
    # As on a machine with a GPU, whose process group is gloo's.
    gloo = SimpleNamespace(_get_backend=lambda device: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match=r"with nccl_ub=True: .* no memory pools; use nccl"):
        arguments.check_nccl_ub(given(distributed_process_group=gloo), gpu)
