"""Optimizers of the sibling wheels under amp, where they are installed: none is ever required."""

import copy
import importlib
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp import _amp_state

optimizers_installed = pytest.mark.skipif(
    importlib.util.find_spec("apex.optimizers") is None,
    reason="apex-optimizers is not installed; apex-amp works with it, and without",
)
parallel_installed = pytest.mark.skipif(
    importlib.util.find_spec("apex.parallel") is None,
    reason="apex-parallel is not installed; apex-amp works with it, and without",
)
HYPER = {
    "FusedAdam": {"lr": 0.01},
    "FusedSGD": {"lr": 0.1, "momentum": 0.9},
    "FusedLAMB": {"lr": 0.05},
    "FusedNovoGrad": {"lr": 0.5},
    "FusedAdagrad": {"lr": 0.05},
    "FusedLARS": {"lr": 5.0, "momentum": 0.9},
}


def network(device):
    torch.manual_seed(0)
    layers = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
    return nn.Sequential(*layers).to(device)


def fused(name, params):
    return getattr(importlib.import_module("apex.optimizers"), name)(params, **HYPER[name])


def larc(name, params):
    wrapper = importlib.import_module("apex.parallel.LARC").LARC
    return wrapper(torch.optim.SGD(params, lr=0.5, momentum=0.9), trust_coefficient=0.2)


def iterate(model, optimizer, bad=False):
    device = next(model.parameters()).device
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).to(device)
    loss = F.cross_entropy(model(x).float(), torch.arange(32, device=device) % 4)
    optimizer.zero_grad()
    with amp.scale_loss(loss * float("inf") if bad else loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return loss.item()


def values(model, optimizer):
    inner = getattr(optimizer, "optim", optimizer)
    places = [*inner.state.values(), *inner.param_groups]  # NovoGrad's groups hold tensors
    states = [v for place in places for v in place.values() if not isinstance(v, (list, str, dict))]
    states = [torch.as_tensor(v) for v in states if v is not None]
    states += [v for group in inner.param_groups for v in group.get("exp_avg_sq", ())]
    return copy.deepcopy([*model.state_dict().values(), *amp.master_params(optimizer), *states])


def check(make, name, level, device):
    model = network(device)
    optimizer = make(name, model.parameters())
    step = optimizer.step
    options = {} if level in ("O1", "O2") else {"loss_scale": "dynamic"}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    _amp_state.loss_scalers[0]._loss_scale = 1024.0
    losses = [iterate(model, optimizer) for _ in range(8)]
    model.eval()  # running statistics would change, whatever the optimizer does
    before, patched = values(model, optimizer), optimizer.step
    iterate(model, optimizer, bad=True)
    for a, b in zip(values(model, optimizer), before, strict=True):
        assert torch.equal(a, b)
    assert _amp_state.loss_scalers[0].loss_scale() == 512.0
    assert optimizer.step == patched != step
    model.train()
    losses += [iterate(model, optimizer) for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0]
    assert not torch.equal(values(model, optimizer)[0], before[0])
    if level in ("O2", "O5"):
        stash = optimizer._amp_stash
        for param, master in zip(
            stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True
        ):
            assert torch.equal(param, master.to(param.dtype))


@optimizers_installed
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("name", HYPER)
def test_fused_optimizers(name, level, device):
    check(fused, name, level, device)


@parallel_installed
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_larc(level, device):
    check(larc, None, level, device)
