"""DistributedFusedAdam where things go wrong, and with parameters that arrive in the forward."""

import gc
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam

SMALL = {"lr": 1e-2, "weight_decay": 0.1, "bucket_cap_mb": 0.0005}


class Sneaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x, past=False):
        return nn.functional.linear(x, self.inner.weight) if past else self.inner(x)


def check_late(rank, world):
    """A parameter that is used past its module before it has arrived is an error, not old."""
    model = Sneaky()
    optimizer = DistributedFusedAdam(model.parameters(), overlap_param_sync=True, module=model)
    x = torch.ones(2, 3)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"optimizer\.param_sync\(\)"):
        model(x, past=True).sum().backward()
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    optimizer.param_sync()
    model(x, past=True).sum().backward()


def test_a_parameter_used_before_it_arrived(two_ranks):
    two_ranks(check_late)


def check_modules_that_are_not_called(rank, world):
    """Their parameters arrive with those of the module that they belong to."""
    both = []
    for overlaps in (True, False):
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(8, 2, batch_first=True)  # uses out_proj's parameters
        extra = nn.ParameterList([torch.ones(8)])
        model = nn.ModuleDict({"attention": attention, "extra": extra})
        model.forward = lambda x, m=attention, e=extra: m(x * e[0], x, x)[0]
        module = model if overlaps else None
        options = {**SMALL, "overlap_param_sync": overlaps, "module": module}
        optimizer = DistributedFusedAdam(model.parameters(), **options)
        for step in range(4):
            torch.manual_seed(10 * step + rank)
            model(torch.randn(2, 3, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.param_sync()
        both.append(list(model.parameters()))
    assert all(map(torch.equal, *both))


def test_modules_that_are_not_called(two_ranks):
    two_ranks(check_modules_that_are_not_called)


def check_dropped(rank, world):
    """An optimizer may go while its gradients and parameters are under way."""
    for _ in range(3):
        model = nn.Linear(300, 300)
        options = {**SMALL, "overlap_param_sync": True, "module": model}
        optimizer = DistributedFusedAdam(model.parameters(), **options)
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        model(torch.ones(2, 300)).sum().backward()
        if rank == 0:
            optimizer.param_sync()
        del optimizer, model
        gc.collect()
        total = torch.ones(100_000)
        dist.all_reduce(total)
        assert (total == world).all()


def test_an_optimizer_that_goes(two_ranks):
    two_ranks(check_dropped)


def check_different(rank, world):
    with pytest.raises(RuntimeError, match=r"ranks \[1\].*differ from rank 0 in the parameters"):
        DistributedFusedAdam([nn.Parameter(torch.ones(3 + rank))])
    param = nn.Parameter(torch.full((3,), float(rank)))
    optimizer = DistributedFusedAdam([param], bucket_cap_mb=1 + rank)
    assert torch.equal(param, torch.zeros(3))  # rank 0's
    param.sum().backward()
    with pytest.raises(RuntimeError, match="parameters, arguments or buckets"):
        optimizer.step()
    assert torch.equal(param, torch.zeros(3))


def test_ranks_that_differ(two_ranks):
    two_ranks(check_different)


def check_death(rank, world, where):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = DistributedFusedAdam(model.parameters(), bucket_cap_mb=0.02)
    x = torch.ones(2, 64)

    def die(_):
        os.kill(os.getpid(), signal.SIGKILL)

    for step in range(3):
        if rank == 1 and step == 2:
            if where == "backward":
                model[1].weight.register_hook(die)
            if where == "step":
                optimizer._check_params_shard_dtypes = die
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 1:
        die(None)
    optimizer.state_dict()


@pytest.mark.parametrize("where", ["backward", "step", "state_dict"])
@pytest.mark.parametrize("ranks", ["doomed_ranks", "four_doomed_ranks"])
def test_a_rank_that_dies_is_an_error_everywhere(ranks, request, where):
    failures = request.getfixturevalue(ranks).failures(check_death, where=where, timeout_s=60)
    assert "died with exit code -9" in failures.pop(1)
    assert len(failures) == (1 if ranks == "doomed_ranks" else 3)
    for text in failures.values():
        assert "RuntimeError" in text, text
