"""DistributedFusedAdam and FusedAdam: the same bits, and each other's checkpoints."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.optimizers import FusedAdam

SHAPES = [(7, 3), (5,), (300,), ()]
HYPER = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}


def parameters(dtype):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def take_steps(optimizer, steps):
    """Gradients are the same on all ranks, and small integers: their average is exact."""
    for step in steps:
        torch.manual_seed(step)
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.randint(-9, 9, param.shape).to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()


def check(rank, world, size, caps, **options):
    """The first ``size`` ranks train together, and each of the others alone."""
    groups = [dist.new_group(range(size)), *(dist.new_group([r]) for r in range(size, world))]
    group = groups[max(0, rank - size + 1)]
    for cap in caps:
        check_size(group, cap=cap, **options)


def check_size(group, dtype, adam_w_mode, cap):
    has_masters = dtype != torch.float32
    ours, whole = parameters(dtype), parameters(dtype)
    hyper = {**HYPER, "adam_w_mode": adam_w_mode}
    distributed = DistributedFusedAdam(ours, bucket_cap_mb=cap, process_group=group, **hyper)
    fused = FusedAdam(whole, master_weights=has_masters, **hyper)
    for optimizer in (distributed, fused):
        take_steps(optimizer, range(4))
    for a, b in zip(ours, whole, strict=True):
        assert torch.equal(a, b)
    state = distributed.state_dict()
    for i, param in enumerate(whole):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state["state"][i][key], fused.state[param][key])
        if has_masters:
            assert torch.equal(state["state"][i]["param"], fused.state[param]["master_param"])
    # From each to the other.
    others = [nn.Parameter(p.detach().clone()) for p in whole]
    loaded = DistributedFusedAdam(others, bucket_cap_mb=cap / 2, process_group=group, **hyper)
    loaded.load_state_dict(fused.state_dict())
    for entry in state["state"].values():
        if has_masters and isinstance(entry, dict):
            entry["master_param"] = entry.pop("param")
    copies = [nn.Parameter(p.detach().clone()) for p in ours]
    back = FusedAdam(copies, master_weights=has_masters, **hyper)
    back.load_state_dict(state)
    for optimizer in (distributed, fused, loaded, back):
        take_steps(optimizer, range(4, 7))
    for a, *rest in zip(ours, whole, others, copies, strict=True):
        assert all(torch.equal(a, b) for b in rest)


# In MiB: a bucket of the least shards, some, one of nearly all parameters, and one of all.
CAPS = (0, 0.0005, 0.001, 100)


@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_same_bits(two_ranks, four_ranks, dtype, adam_w_mode):
    options = {"dtype": dtype, "adam_w_mode": adam_w_mode, "caps": CAPS}
    for size in (1, 2):
        two_ranks(check, size=size, **options)
    for size in (3, 4):
        four_ranks(check, size=size, **options)
