"""Two real processes: torch's DistributedDataParallel and FSDP2 around initialized models."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp import _amp_state

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
STEPS = 4
OVERFLOW_STEP = 1
SCALE = 4096.0
# The last elements of a shard leave torch's vectorized loops, which round float16 otherwise.
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(8, 7, bias=False), nn.BatchNorm1d(7), nn.ReLU()),  # 7: unequal shards
        nn.Sequential(nn.Linear(7, 8), nn.GELU(), nn.Linear(8, 4)),
    )


def initialize(model, level, make=torch.optim.SGD):
    optimizer = make(model.parameters(), lr=0.1)
    # FSDP2 halves float16 gradients before it adds them up: exact above the subnormals.
    options = {} if level == "O0" else {"loss_scale": "dynamic", "max_loss_scale": SCALE}
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def train(model, optimizer, rank, wrapped=None, same_data=True):
    """A few steps, one of which overflows on the last process only; returns the losses."""
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step if same_data else 10 * step + rank)
        optimizer.zero_grad()
        for _ in range(2):
            loss = F.cross_entropy((wrapped or model)(torch.randn(6, 8)), torch.arange(6) % 4)
            losses.append(loss.item())
            overflows = step == OVERFLOW_STEP and _amp_state.loss_scalers[0].dynamic
            if overflows and not same_data and rank == 1:
                loss = loss * float("inf")
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
                if overflows and same_data:
                    overflow(model, rank)
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 100.0)
        optimizer.step()
    return losses


def overflow(model, rank):
    grad = model[3][0].weight.grad
    grad = grad.to_local() if hasattr(grad, "to_local") else grad
    if rank == dist.get_world_size() - 1:
        grad.view(-1)[-1] = float("inf")


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def finish():
    if hasattr(_amp_state, "handle"):
        _amp_state.handle._deactivate()


def check_fsdp(rank, world, level, kind):
    """With the same data everywhere, shards are those of a run without them."""
    from torch.distributed.fsdp import fully_shard

    make = getattr(torch.optim, kind)
    make = make if kind == "SGD" else lambda params, lr: torch.optim.Adam(params, lr, eps=1e-4)
    plain, optimizer = initialize(network(), level, make)
    expected_losses = train(plain, optimizer, world - 1)
    expected = [whole(p) for p in amp.master_params(optimizer)]
    expected_amp = amp.state_dict()

    model = network()
    fully_shard(model[1])  # alone: FSDP2 wants one dtype per group, and O2 keeps it in float32
    fully_shard(model[3])
    fully_shard(model)
    model, optimizer = initialize(model, level, make)
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in plain.parameters()]
    torch.testing.assert_close(train(model, optimizer, rank), expected_losses, **CLOSE)
    assert amp.state_dict() == expected_amp
    masters = list(amp.master_params(optimizer))
    assert {type(p).__name__ for p in masters} == {"DTensor"}
    for actual, value in zip(masters, expected, strict=True):
        torch.testing.assert_close(whole(actual), value, **CLOSE)

    state = copy.deepcopy(model.state_dict())
    before = {name: whole(value).clone() for name, value in state.items()}
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(before[name], value, **CLOSE)
    train(model, optimizer, rank)
    assert not torch.equal(whole(model.state_dict()["0.weight"]), before["0.weight"])
    model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert torch.equal(whole(value), before[name]), name
    finish()


def check_ddp(rank, world, level):
    """Processes agree in every bit, whatever process an overflow comes from."""
    model, optimizer = initialize(network(), level)
    wrapped = nn.parallel.DistributedDataParallel(model)
    train(model, optimizer, rank, wrapped, same_data=False)
    if _amp_state.loss_scalers[0].dynamic:
        assert _amp_state.loss_scalers[0].loss_scale() < SCALE
    for param in (*amp.master_params(optimizer), *model.parameters()):
        values = [torch.empty_like(param) for _ in range(world)]
        dist.all_gather(values, param.detach())
        assert all(torch.equal(value, param) for value in values)
        assert param.isfinite().all()
    finish()


FSDP_CASES = [*((level, "SGD") for level in LEVELS), ("O2", "Adam"), ("O5", "Adam")]


@pytest.mark.parametrize(("level", "kind"), FSDP_CASES)
def test_fsdp2(level, kind, two_ranks):
    two_ranks(check_fsdp, level=level, kind=kind)


@pytest.mark.parametrize("level", LEVELS)
def test_ddp(level, two_ranks):
    two_ranks(check_ddp, level=level)
