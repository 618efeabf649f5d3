"""DistributedFusedLAMB's methods that scripts replace on the instance."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(model, optimizer, scaler=None):
    for step in range(2):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 40)).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        optimizer.zero_grad()
    return list(model.parameters())


def make(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 3))
    return model, DistributedFusedLAMB(model.parameters(), lr=0.1, max_grad_norm=0.1, **options)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"overlap_reductions": False}, {"clip_after_ar": False}, {"dwu_num_blocks": 2}],
    ids=str,
)
def test_methods_are_called_where_scripts_replace_them(options, scaled, world):
    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None

    expected = train(*make(**options), scaler())
    model, optimizer = make(**options)
    calls, native = [], (optimizer._pipeline_block_reductions, optimizer._pipeline_step)

    def reduce(block_id):
        calls.append(block_id)
        native[0](block_id)

    def step():
        native[1]()
        calls.append("step")

    optimizer._pipeline_block_reductions, optimizer._pipeline_step = reduce, step
    found = train(model, optimizer, scaler())
    blocks = options.get("dwu_num_blocks", 4)
    assert calls == [*reversed(range(blocks)), "step"] * 2
    assert all(map(torch.equal, found, expected))


def test_a_step_that_a_script_leaves_out(world):
    """Its scaler hears of no overflow, and the next step works."""
    model, optimizer = make()
    before = [param.detach().clone() for param in model.parameters()]
    native, optimizer._pipeline_step = optimizer._pipeline_step, lambda: None
    assert all(map(torch.equal, train(model, optimizer, torch.amp.GradScaler("cpu")), before))
    optimizer._pipeline_step = native
    assert not torch.equal(train(model, optimizer)[0], before[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.int16, torch.complex64])
def test_copies_are_looked_at_before_the_first_write(dtype):
    lists = [[torch.ones(17)] for _ in range(4)]
    copies, norm = [torch.zeros(17).to(dtype)], torch.ones(1, dtype=torch.float64)
    numbers = (0.1, None, 0.9, 0.99, 1e-6, 0.1, 1, None, True, False, True, False, norm, 1.0)
    with pytest.raises(RuntimeError, match="lamb_step: copies must be"):
        torch.ops.apex_contrib.lamb_step(*lists, copies, *numbers, None, None)
    assert all(torch.equal(tensors[0], torch.ones(17)) for tensors in lists)
