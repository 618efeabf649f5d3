"""DistributedDataParallel's process groups: nobody else's collectives come between its own."""

import copy
import gc
import weakref

import torch
import torch.distributed as dist
from torch import nn

from apex.parallel import DistributedDataParallel, SyncBatchNorm
from apex.parallel.ddp import groups
from apex_testkit.branches import Branches, every_mode, values


class Encoder(nn.Module):
    """Its last layer is used by some ranks only."""

    def __init__(self):
        super().__init__()
        self.layer, self.extra = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

    def forward(self, x, deep):
        x = self.layer(x)
        return self.extra(x) if deep else x


def check_two_wrappers(rank, world, options):
    """The encoder's buckets leave at other times on other ranks, the decoder's between them."""
    torch.manual_seed(0)
    encoder, decoder = Encoder().double(), nn.Linear(3, 3, bias=False).double()
    wrapped = [DistributedDataParallel(model, **options) for model in (encoder, decoder)]
    params = [*encoder.parameters(), *decoder.parameters()]
    for step in range(3):
        x = torch.randn(world, 5, 3, dtype=torch.float64)
        deep = [step == 0 or r == 0 for r in range(world)]
        losses = [encoder(decoder(x[r]), deep[r]).square().sum() for r in range(world)]
        wanted = torch.autograd.grad(sum(losses) / world, params)
        for model in wrapped:
            model.zero_grad()
        wrapped[0](wrapped[1](x[rank]), deep[rank]).square().sum().backward()
        for param, grad in zip(params, wanted, strict=True):
            torch.testing.assert_close(param.grad, grad, rtol=1e-13, atol=1e-15)


@every_mode
def test_ranks_that_differ_beside_another_wrapper(two_ranks, four_ranks, options):
    two_ranks(check_two_wrappers, options=options)
    four_ranks(check_two_wrappers, options=options)


class Heads(nn.Module):
    """Every rank has a head of its own behind a batch norm over all ranks."""

    def __init__(self, norm, world):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Linear(4, 3), norm
        self.heads = nn.ModuleList([nn.Linear(3, 2) for _ in range(world)])


def check_sync_batch_norm(rank, world, options):
    whole = Heads(nn.BatchNorm1d(3), world).double()
    mine = Heads(SyncBatchNorm(3), world).double()
    mine.forward = lambda x: mine.heads[rank](mine.norm(mine.stem(x))).square().sum()
    ddp = DistributedDataParallel(mine, **options)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(world, 6, 4, dtype=torch.float64)
        whole.zero_grad()
        ddp.zero_grad()
        hidden = whole.norm(whole.stem(x.flatten(0, 1))).unflatten(0, (world, 6))
        losses = [head(hidden[r]).square().sum() for r, head in enumerate(whole.heads)]
        (sum(losses) / world).backward()
        ddp(x[rank]).backward()
        for a, b in zip(mine.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-13)


@every_mode
def test_ranks_that_differ_beside_sync_batch_norm(two_ranks, four_ranks, options):
    two_ranks(check_sync_batch_norm, options=options)
    four_ranks(check_sync_batch_norm, options=options)


def check_copy_on_one_rank(rank, world):
    """A copy attaches in its first reduced backward, so one rank alone may evaluate it."""
    ddp = DistributedDataParallel(Branches(2), num_allreduce_streams=2)
    if rank == 0:
        duplicate = copy.deepcopy(ddp)
        assert duplicate([0]).item() == 0.0
        duplicate.disable_allreduce()
        duplicate([0]).backward()
        assert values(duplicate) == [1.0, None]
    ddp([0, 1], factor=rank).backward()
    assert values(ddp) == [(world - 1) / 2] * 2


def test_copy_on_one_rank(two_ranks):
    two_ranks(check_copy_on_one_rank)


def check_own_groups(rank, world):
    """Nobody else has a wrapper's groups while it lives, and none are made for every wrapper."""
    first = DistributedDataParallel(Branches(1), num_allreduce_streams=2)
    second = DistributedDataParallel(Branches(1))
    used = [*first.bucket_pgs, *second.bucket_pgs]
    assert len(set(used)) == 3
    assert dist.group.WORLD not in used
    timeouts = {group._get_backend(torch.device("cpu")).options._timeout for group in used}
    assert timeouts == {dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout}
    for _ in range(3):
        second([0], factor=rank).backward()
        assert second.bucket_pgs == used[2:]
    kept = first if rank == 0 else None
    del first
    gc.collect()
    third = DistributedDataParallel(Branches(1))  # rank 0 still holds the first wrapper's groups
    assert not set(third.bucket_pgs) & set(used)
    del kept
    gc.collect()
    count = sum(map(len, groups._groups.values()))
    for _ in range(3):
        later = DistributedDataParallel(Branches(1), num_allreduce_streams=2)
        later([0], factor=rank).backward()
        assert values(later) == [(world - 1) / 2]
        del later
        gc.collect()
    assert sum(map(len, groups._groups.values())) == count
    # A backward that ends in the middle may leave ranks with different numbers of collectives.
    broken = DistributedDataParallel(Branches(1))
    (left,) = broken.bucket_pgs
    broken._reducer.lane_set.settle(rank == 0)
    del broken
    gc.collect()
    assert left not in DistributedDataParallel(Branches(1)).bucket_pgs


def test_wrappers_have_groups_of_their_own(two_ranks):
    two_ranks(check_own_groups)


def check_new_default_group(rank, world, file):
    ddp = DistributedDataParallel(Branches(2), message_size=1)
    ddp([0, 1], factor=rank).backward()
    old = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    gc.collect()
    assert old() is None
    for _ in range(2):
        ddp.zero_grad()
        ddp([0, 1], factor=rank).backward()
        assert values(ddp) == [(world - 1) / 2] * 2
    assert all(dist.get_world_size(group) == world for group in ddp.bucket_pgs)


def test_default_group_made_again(doomed_ranks, tmp_path):
    doomed_ranks(check_new_default_group, file=str(tmp_path / "again"))
