"""DistributedDataParallel in the loops that users write: no_sync, join, fullgraph compilation."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

from apex.parallel import DistributedDataParallel
from apex_testkit.branches import Branches, every_mode, values


def check_no_sync(rank, world, options):
    average = (world - 1) / 2
    ddp = DistributedDataParallel(Branches(2), **options)
    for _ in range(2):  # in the recording iteration, and in later ones
        ddp.zero_grad()
        with ddp.no_sync():
            with ddp.no_sync():
                ddp([0, 1], factor=rank).backward()
            ddp([0], factor=rank).backward()  # the inner context has not ended the outer one
            later = ddp([0], factor=rank)
        assert values(ddp) == [2.0 * rank, float(rank)]
        later.backward()
        assert values(ddp) == [3.0 * rank, float(rank)]
        outside = ddp([0], factor=rank)
        with ddp.no_sync():
            outside.backward()
        assert values(ddp) == [4 * average, average]  # with all that had accumulated
    with pytest.raises(ArithmeticError), ddp.no_sync():
        raise ArithmeticError
    ddp.zero_grad()
    ddp([1], factor=rank).backward()
    assert values(ddp) == [None, average]


@every_mode
def test_no_sync(two_ranks, options):
    two_ranks(check_no_sync, options=options)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def batch(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def descend(model):
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad


def trained_alone(counts, divide_by_all, accumulate):
    """What all ranks must end with: the copy of a rank that had inputs until the end."""
    replicas = [build() for _ in counts]
    for step in range(max(counts)):
        active = [r for r, count in enumerate(counts) if step < count]
        for rank in active:
            replicas[rank](batch(rank, step)).square().mean().backward()
        if accumulate and step % 2 == 0:
            continue
        divisor = len(counts) if divide_by_all else len(active)
        for same in zip(*(replicas[r].parameters() for r in active), strict=True):
            total = sum(param.grad for param in same) / divisor
            for param in same:
                param.grad = total.clone()
        for rank in active:
            descend(replicas[rank])
            replicas[rank].zero_grad()
    last = max(r for r, count in enumerate(counts) if count == max(counts))
    return replicas[last].state_dict()


def check_join(rank, world, counts, divide_by_all, options, accumulate):
    ddp = DistributedDataParallel(build(), **options)
    for _ in range(2 if divide_by_all else 1):  # the context leaves nothing behind
        ddp.module.load_state_dict(build().state_dict())
        ddp.zero_grad()
        with ddp.join(divide_by_initial_world_size=divide_by_all):
            for step in range(counts[rank]):
                if accumulate and step % 2 == 0:
                    with ddp.no_sync():
                        ddp(batch(rank, step)).square().mean().backward()
                    continue
                ddp(batch(rank, step)).square().mean().backward()
                descend(ddp)
                ddp.zero_grad()
        wanted = trained_alone(counts, divide_by_all, accumulate)
        for name, value in ddp.module.state_dict().items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-14)
    assert not ddp._join_config.enable  # forwards are as they were
    ddp(batch(rank, 0)).square().mean().backward()  # ranks together again


@every_mode
def test_join(two_ranks, options):
    two_ranks(check_join, counts=[2, 5], divide_by_all=True, options=options, accumulate=False)


@pytest.mark.parametrize("counts", [[0, 3], [3, 0]])
def test_join_without_any_input(two_ranks, counts):
    two_ranks(check_join, counts=counts, divide_by_all=False, options={}, accumulate=False)


def test_join_of_four(four_ranks):
    options = {"message_size": 4}
    four_ranks(
        check_join, counts=[2, 4, 8, 6], divide_by_all=False, options=options, accumulate=True
    )


def check_early_end(rank, world):
    ddp = DistributedDataParallel(Branches(1))

    def train():
        with ddp.join(throw_on_early_termination=True):
            for _ in range(1 + rank):
                ddp([0]).backward()

    with pytest.raises(RuntimeError, match="exhausted"):
        train()
    ddp = DistributedDataParallel(Branches(1))
    with ddp.join(enable=False), Join([ddp], enable=False):
        ddp([0], factor=rank).backward()
    assert values(ddp) == [(world - 1) / 2]


def test_join_may_throw(two_ranks):
    two_ranks(check_early_end)


def check_fullgraph(rank, world, options):
    layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    plain = DistributedDataParallel(copy.deepcopy(layers))
    ddp = DistributedDataParallel(layers, **options)
    compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
    x = torch.full((3, 2), rank + 1.0, dtype=torch.float64)

    def compare():
        for a, b in zip(plain.parameters(), ddp.parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-13, atol=1e-15)

    for _ in range(3):
        plain.zero_grad()
        ddp.zero_grad()
        with plain.no_sync(), ddp.no_sync():
            plain(x).sum().backward()
            compiled(x).sum().backward()
        compare()
        for model in (plain, compiled):
            model(-x).sum().backward()
        compare()
    with torch.no_grad():
        compiled(x)
    for model in (plain, ddp):
        with pytest.raises(RuntimeError, match="backward without a forward"):
            model.module(x).sum().backward()


@every_mode
def test_fullgraph_compilation(two_ranks, options):
    two_ranks(check_fullgraph, options=options)
