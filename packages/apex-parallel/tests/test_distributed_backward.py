"""DistributedDataParallel: parameters unused, shared, frozen; accumulation; ranks that fail."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex.parallel import DistributedDataParallel
from apex_testkit.branches import Branches, every_mode, values


def check_unused(rank, world, options):
    ddp = DistributedDataParallel(Branches(), **options)
    for used_by_rank, expected in (
        ([[0, 1], [1, 2]], [0.5, 1.0, 0.5, None]),  # already in the first backward
        ([[0, 1, 2, 3], [0, 1, 2, 3]], [1.0, 1.0, 1.0, 1.0]),
        ([[1], [1]], [None, 1.0, None, None]),
        ([[3], [0]], [0.5, None, None, 0.5]),
    ):
        ddp.zero_grad()
        ddp(used_by_rank[rank]).backward()
        assert values(ddp) == expected
    # Gradients that are kept, as without zero_grad, only grow by the average of what is new.
    ddp([[2], [3]][rank]).backward()
    assert values(ddp) == [0.5, None, 0.5, 1.0]


@every_mode
def test_unused_parameters(two_ranks, options):
    two_ranks(check_unused, options=options)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3).double()
        self.second = nn.Linear(3, 3).double()
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).square().sum()


def check_shared(rank, world, options):
    inputs = [torch.full((2, 3), r + 1.0, dtype=torch.float64) for r in range(world)]
    alone = Shared()
    (sum(alone(x) for x in inputs) / world).backward()
    ddp = DistributedDataParallel(Shared(), **options)
    for _ in range(2):
        ddp.zero_grad()
        ddp(inputs[rank]).backward()
        for mine, wanted in zip(ddp.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-13, atol=1e-15)


@every_mode
def test_shared_parameters(two_ranks, options):
    two_ranks(check_shared, options=options)


def check_accumulation(rank, world, options):
    ddp = DistributedDataParallel(Branches(2), **options)
    for _ in range(2):
        ddp.zero_grad()
        ddp.disable_allreduce()
        ddp([0, 1], factor=rank).backward()
        ddp([0]).backward()
        assert values(ddp) == [rank + 1.0, float(rank)]  # local
        ddp.enable_allreduce()
        ddp([0]).backward()  # branch 1 brings what it accumulated, though it is unused now
        assert values(ddp) == [2.0 + (world - 1) / 2, (world - 1) / 2]


@every_mode
def test_local_accumulation(two_ranks, options):
    two_ranks(check_accumulation, options=options)


def check_toggling_after_forward(rank, world, options):
    ddp = DistributedDataParallel(Branches(1), **options)
    output = ddp([0], factor=rank)
    ddp.disable_allreduce()
    output.backward()
    assert values(ddp) == [float(rank)]
    output = ddp([0], factor=rank)
    ddp.enable_allreduce()
    output.backward()
    assert values(ddp) == [float(world - 1)]
    first, second = ddp([0], factor=rank), ddp([0], factor=rank)
    ddp.zero_grad()
    ddp.disable_allreduce()
    first.backward()
    ddp.enable_allreduce()
    second.backward()  # two forwards, one reduced backward
    assert values(ddp) == [float(world - 1)]
    ddp.delay_allreduce = not ddp.delay_allreduce
    ddp.zero_grad()
    for _ in range(2):
        ddp([0], factor=rank / 2).backward()
    assert values(ddp) == [(world - 1) / 2]


@every_mode
def test_toggling_between_forward_and_backward(two_ranks, options):
    two_ranks(check_toggling_after_forward, options=options)


def check_second_backward(rank, world, options):
    ddp = DistributedDataParallel(Branches(2), **options)
    for _ in range(2):  # in the recording iteration, and in later ones
        output = ddp([0, 1])
        output.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="backward without a forward through the wrapper"):
            output.backward()
        ddp.zero_grad()
        ddp([0, 1], factor=rank).backward()
        assert values(ddp) == [(world - 1) / 2] * 2
    with pytest.raises(RuntimeError, match="backward without a forward through the wrapper"):
        ddp.module([0]).backward()
    with torch.no_grad():
        ddp([0])
    with pytest.raises(RuntimeError, match="backward without a forward through the wrapper"):
        ddp.module([0]).backward()


@every_mode
def test_second_backward_is_refused(two_ranks, options):
    two_ranks(check_second_backward, options=options)


def check_freezing(rank, world, options):
    ddp = DistributedDataParallel(Branches(3), **options)
    ddp([0, 1, 2], factor=rank).backward()
    ddp.module.branches[1].requires_grad_(False)
    ddp.zero_grad()
    ddp([0, 1, 2], factor=rank).backward()
    assert values(ddp) == [(world - 1) / 2, None, (world - 1) / 2]
    assert len(ddp.active_params) == 2
    ddp.module.branches[1].requires_grad_(True)
    ddp.zero_grad()
    ddp([0, 1, 2], factor=rank).backward()
    assert values(ddp) == [(world - 1) / 2] * 3
    ddp.eval()
    with torch.no_grad():
        assert ddp([0]).item() == 0.0
    ddp.zero_grad()
    ddp([1], factor=rank).backward()  # eval mode changes nothing about gradients
    assert values(ddp) == [None, (world - 1) / 2, None]


@every_mode
def test_freezing_and_eval(two_ranks, options):
    two_ranks(check_freezing, options=options)


def check_frozen_as_a_whole(rank, world, options):
    """A discriminator that is frozen for every other step keeps its buckets."""
    ddp = DistributedDataParallel(Branches(3), **options)
    ddp([0, 1, 2], factor=rank).backward()
    plan, hooks = ddp.active_i_buckets, dict(ddp._reducer.hooks)
    for step in range(3):
        x = torch.ones((), requires_grad=True)
        ddp.module.requires_grad_(False)
        ddp.zero_grad()
        ddp([0, 1, 2], factor=x * rank).backward()
        assert x.grad is not None
        assert values(ddp) == [None] * 3
        ddp.module.requires_grad_(True)
        ddp([0, 1, 2], factor=rank + step).backward()
        assert not ddp.needs_refresh
        assert ddp.active_i_buckets is plan
        assert ddp._reducer.hooks == hooks
        assert values(ddp) == [(world - 1) / 2 + step] * 3


@every_mode
def test_frozen_as_a_whole(two_ranks, options):
    two_ranks(check_frozen_as_a_whole, options=options)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("backward failed")


def check_recovery(rank, world, options):
    ddp = DistributedDataParallel(Branches(3), **options)
    for _ in range(2):
        middle = ddp([0], factor=Fails.apply(ddp.module.branches[1].sum()))
        with pytest.raises(ArithmeticError):
            (middle + ddp.module([2])).backward()
        ddp.zero_grad()
        ddp([0, 1, 2], factor=rank).backward()
        assert values(ddp) == [(world - 1) / 2] * 3


@every_mode
def test_a_failed_backward_leaves_nothing_behind(two_ranks, options):
    two_ranks(check_recovery, options=options)


def check_sparse(rank, world):
    ddp = DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(NotImplementedError, match=r"\[4, 2\].*sparse"):
        ddp(torch.tensor([1])).sum().backward()


def test_sparse_gradients_are_refused(two_ranks):
    two_ranks(check_sparse)


def check_disagreement(rank, world):
    for model in (nn.Linear(2 + rank, 2), nn.Linear(2, 2, bias=rank == 0)):
        with pytest.raises(RuntimeError, match=r"the parameters of ranks \[1\] differ"):
            DistributedDataParallel(model)
    ddp = DistributedDataParallel(Branches(2))
    ddp.module.branches[rank].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"require gradients of ranks \[1\] differ"):
        ddp([0, 1]).backward()


def test_different_models_are_refused(two_ranks):
    two_ranks(check_disagreement)


def check_death(rank, world, when):
    ddp = DistributedDataParallel(Branches(2), message_size=1)
    ddp([0, 1]).backward()
    if rank == 1 and when == "before backward":
        os._exit(7)
    output = ddp([0, 1])
    if rank == 1:
        output.register_hook(lambda grad: os._exit(7))
    message = (
        r"^DistributedDataParallel \(rank 0\): the all-reduce of bucket \d of 2 \(branches.[01]\) "
        r"failed\. No word from rank 1 for 2 s.* start again from a checkpoint"
    )
    with pytest.raises(RuntimeError, match=message):
        output.backward()
    with pytest.raises(RuntimeError):
        dist.barrier()


@pytest.mark.parametrize("when", ["before backward", "in backward"])
def test_death_of_a_rank_is_an_error(doomed_ranks, when):
    doomed_ranks(check_death, timeout_s=30, expect_death=(1,), when=when)
