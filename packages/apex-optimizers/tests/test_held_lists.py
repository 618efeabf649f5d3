"""Lists that FusedSGD and FusedAdagrad leave in C++: same bits, every replaced tensor noticed."""

import copy
import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from apex.optimizers import FusedAdagrad, FusedSGD
from apex.optimizers.fused_adagrad.optimizer import ADAGRAD
from apex.optimizers.fused_sgd.optimizer import SGD
from apex.optimizers.stepping.held_lists import MIN_TENSORS
from apex_testkit.amp_masters import with_masters
from apex_testkit.held_lists import PlainLists, holders

COUNT = MIN_TENSORS + 3
KINDS = {
    "sgd": (partial(FusedSGD, momentum=0.9), "momentum_buffer", SGD.held),
    "nesterov": (partial(FusedSGD, momentum=0.9, nesterov=True), "momentum_buffer", SGD.held),
    "plain_sgd": (FusedSGD, None, SGD.held),
    "adagrad": (FusedAdagrad, "sum", ADAGRAD.held),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def make(cls, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(3 + i % 5, generator=generator) for i in range(COUNT)]
    params = [torch.nn.Parameter(v.to(device, dtype)) for v in values]
    return params, cls(params, lr=0.1, weight_decay=0.01)


def advance(params, optimizer, steps=3, seed=2):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        optimizer.step()


def compare_with_plain(kind, device, change, dtype=torch.float32):
    """Some steps, ``change(params, optimizer)``, some steps: with held lists and without."""
    results = []
    for is_plain in (False, True):
        with PlainLists() if is_plain else nullcontext():
            params, optimizer = make(kind[0], device, dtype)
            advance(params, optimizer, 4)
            assert bool(holders(optimizer)) != is_plain
            change(params, optimizer)
            advance(params, optimizer, 4, seed=3)
            assert bool(holders(optimizer)) != is_plain
        states = [optimizer.state[p].get(kind[1], p) for p in params]
        results.append([*params, *states])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_same_bits_as_with_plain_lists(kind, dtype, device):
    compare_with_plain(kind, device, lambda *_: None, dtype)


def replace_data(params, optimizer):
    params[1].data = torch.ones_like(params[1])


def replace_state(params, optimizer):
    for key, value in optimizer.state[params[1]].items():
        if value.dim() > 0:
            optimizer.state[params[1]][key] = value * 2


def replace_state_dict(params, optimizer):
    optimizer.state[params[2]] = copy.deepcopy(optimizer.state[params[3]])
    for key, value in optimizer.state[params[2]].items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            optimizer.state[params[2]][key] = torch.ones_like(params[2])


def replace_param(params, optimizer):
    params[3] = torch.nn.Parameter(torch.ones_like(params[3]))
    optimizer.param_groups[0]["params"][3] = params[3]


def add_group(params, optimizer):
    added = [torch.nn.Parameter(p.detach().clone()) for p in params]
    params += added
    optimizer.add_param_group({"params": added, "lr": 0.2})


def freeze_some(params, optimizer):
    for p in params[:2]:
        p.grad = None
    optimizer.step()


def load_own_state(params, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


CHANGES = [
    replace_data,
    replace_state,
    replace_state_dict,
    replace_param,
    add_group,
    freeze_some,
    load_own_state,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_replaced_is_noticed(kind, change, device):
    compare_with_plain(kind, device, change)


def test_a_gradient_that_does_not_fit_changes_nothing(kind, device):
    params, optimizer = make(kind[0], device)
    advance(params, optimizer, 4)
    before = [p.detach().clone() for p in params]
    params[5].grad = torch.ones_like(params[5]).to_sparse()
    with pytest.raises(RuntimeError, match="gradient of parameter 5 is sparse"):
        optimizer.step()
    assert all(map(torch.equal, before, params))


def test_lists_are_released_with_the_optimizer(kind, device):
    gc.collect()
    like = torch.empty(0, device=device)
    before = kind[2].count(like)
    params, optimizer = make(kind[0], device)
    advance(params, optimizer, 4)
    assert kind[2].count(like) == before + 1
    del params, optimizer
    gc.collect()
    assert kind[2].count(like) == before


def test_numbers_of_nobody_are_errors(kind, device):
    hyper = {
        SGD.held: (0.1, None, 0.9, 0.0, 0.0, False, False, False, 1.0, None),
        ADAGRAD.held: (0.1, 1e-8, 0.0, False, False),
    }[kind[2]]
    with pytest.raises(RuntimeError, match="no lists are held under the number -1;"):
        kind[2].step(-1, 0, [torch.ones(3, device=device)], *hyper)
    with pytest.raises(NotImplementedError, match="cannot be traced"):
        kind[2].step(1, 0, [torch.ones(3, device="meta")], *hyper)


@pytest.mark.parametrize("materialize", [True, False])
def test_masters_and_their_copies(materialize, device):
    """The model's 16-bit copies are held, too, and a copy that is replaced is noticed."""
    results = []
    for is_plain in (False, True):
        generator = torch.Generator().manual_seed(4)
        values = [torch.randn(3 + i % 5, generator=generator) for i in range(COUNT)]
        models = [torch.nn.Parameter(v.to(device, torch.bfloat16)) for v in values]
        options = {"lr": 0.1, "momentum": 0.9, "materialize_master_grads": materialize}
        with PlainLists() if is_plain else nullcontext():
            optimizer, masters = with_masters(FusedSGD, models, [], **options)
            for step in range(6):
                for p in masters if materialize else models:
                    p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
                if step == 4:
                    assert bool(holders(optimizer)) != is_plain
                    models[1].data = torch.zeros_like(models[1])  # other memory
                optimizer.step()
        for model, master in zip(models, masters, strict=True):
            assert torch.equal(model.detach(), master.detach().to(torch.bfloat16))
        results.append([p.detach().clone() for p in masters])
    assert all(map(torch.equal, *results))
    assert not torch.equal(results[0][0], values[0].to(device, torch.bfloat16).float())
