"""What amp changes about an optimizer: master weights, and the methods it replaces."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp import _amp_state
from apex.amp._process_optimizer import _process_optimizer
from apex.amp.frontend import Properties, opt_levels

half, bfloat16, single = torch.float16, torch.bfloat16, torch.float32


def network():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def build(level="O2", model=None, make=torch.optim.SGD, **kwargs):
    model = model or network()
    optimizer = make(model.parameters(), lr=0.1)
    options = {"loss_scale": 128.0, **kwargs}
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def backward(model, optimizer, **kwargs):
    loss = F.mse_loss(model(torch.ones(4, 8) + torch.arange(4.0)[:, None]), torch.ones(4, 2))
    with amp.scale_loss(loss, optimizer, **kwargs) as scaled_loss:
        scaled_loss.backward()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters(level):
    model, optimizer = build(level)
    lower = {"O2": half, "O5": bfloat16}[level]
    backward(model, optimizer)
    stash = optimizer._amp_stash
    assert stash.lazy_init_called
    assert [p.dtype for p in stash.all_fp16_params] == [lower] * 4
    assert [p.dtype for p in stash.all_fp32_from_fp16_params] == [single] * 4
    assert stash.all_fp32_from_fp32_params == [model[1].weight, model[1].bias]
    assert stash.fp16_groups == [stash.all_fp16_params]
    assert stash.fp32_from_fp16_groups == [stash.all_fp32_from_fp16_params]
    assert stash.fp32_from_fp32_groups == [stash.all_fp32_from_fp32_params]
    assert {p.dtype for p in amp.master_params(optimizer)} == {single}
    for param, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
        assert master.is_leaf
        assert master.requires_grad
        assert torch.equal(master.to(lower), param)
    before = [m.detach().clone() for m in stash.all_fp32_from_fp16_params]
    optimizer.step()
    for param, master, old in zip(
        stash.all_fp16_params, stash.all_fp32_from_fp16_params, before, strict=True
    ):
        assert not torch.equal(master, old)
        assert torch.equal(master.to(lower), param)
        assert master.grad is None


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O4"])
def test_no_masters(level):
    model, optimizer = build(level, loss_scale=2.0)
    params = list(model.parameters())
    backward(model, optimizer)
    assert list(amp.master_params(optimizer)) == params
    lists = optimizer._amp_stash.all_fp16_params, optimizer._amp_stash.all_fp32_params
    assert [len(entries) for entries in lists] == ([6, 0] if level == "O3" else [0, 6])
    assert not hasattr(optimizer, "_master_params_to_model_params")


def test_state_follows_the_masters_in_float32():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    before = [copy.deepcopy(optimizer.state[p]) for p in model.parameters()]
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    optimizer.zero_grad()
    for param, state in zip(amp.master_params(optimizer), before, strict=True):
        for name, value in state.items():
            assert optimizer.state[param][name].dtype is value.dtype
            assert torch.equal(optimizer.state[param][name], value)


@pytest.mark.parametrize("set_to_none", [None, True, False])
def test_zero_grad(set_to_none):
    model, optimizer = build()
    backward(model, optimizer)
    assert all(p.grad is not None for p in model.parameters())
    optimizer.zero_grad() if set_to_none is None else optimizer.zero_grad(set_to_none=set_to_none)
    for param in model.parameters():
        if set_to_none is False:
            assert param.grad.abs().sum() == 0
        else:
            assert param.grad is None
    assert all(p.grad is None for p in optimizer._amp_stash.all_fp32_from_fp16_params)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_add_param_group(level):
    model, optimizer = build(level, nn.Linear(8, 8))
    dtype = {"O2": half, "O5": bfloat16}.get(level, single)
    head = nn.Linear(8, 2).to(dtype)
    extra = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": head.parameters(), "lr": 0.5})
    optimizer.add_param_group({"params": extra})
    assert [len(g["params"]) for g in optimizer.param_groups] == [2, 2, 1]
    assert optimizer.param_groups[1]["lr"] == 0.5
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    loss = (head(model(torch.ones(4, 8)).to(dtype)).float() * extra).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    after = list(amp.master_params(optimizer))
    assert {p.dtype for p in after} == {single}
    for old, new in zip(before, after, strict=True):
        assert not torch.equal(old, new)
    if dtype is not single:
        assert torch.equal(after[2].to(dtype), head.weight)
        assert [len(g) for g in optimizer._amp_stash.fp16_groups] == [2, 2, 0]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("group", "error", "text"),
    [
        ([], TypeError, "must be a dict"),
        ({"params": {nn.Parameter(torch.ones(1))}}, TypeError, "set"),
        ({"params": [nn.Parameter(torch.ones(1, dtype=torch.float64))]}, TypeError, "float64"),
        ({"params": [3]}, TypeError, "int"),
        (None, ValueError, "some parameters appear"),
    ],
)
def test_refused_groups_change_nothing(level, group, error, text):
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer = amp.initialize(nn.Linear(2, 2), optimizer, opt_level=level, verbosity=0)[1]
    with pytest.raises(error, match=text):
        optimizer.add_param_group({"params": [weight]} if group is None else group)
    assert len(optimizer.param_groups) == 1
    stash = optimizer._amp_stash
    assert len(stash.all_fp32_params) + len(stash.all_fp32_from_fp32_params) <= 1


def test_parameters_of_other_dtypes():
    for level in ("O1", "O2"):
        _amp_state.allow_incoming_model_not_fp32 = True
        model = nn.Linear(8, 8).double()
        model, optimizer = build(level, model, cast_model_type=False, loss_scale=2.0)
        loss = model(torch.ones(1, 8, dtype=torch.float64)).sum()
        with (
            pytest.raises(TypeError, match=r"param_groups\[0\].*float64"),
            amp.scale_loss(loss, optimizer),
        ):
            pass
        assert not optimizer._amp_stash.lazy_init_called
        assert list(amp.master_params(optimizer)) == list(model.parameters())


def test_frozen_parameters_join_when_unfrozen():
    model = network()
    model[0].requires_grad_(False)
    model, optimizer = build(model=model)
    backward(model, optimizer)
    optimizer.step()
    assert model[0].weight in set(amp.master_params(optimizer))
    before = model[0].weight.clone()
    model[0].requires_grad_(True)
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert {p.dtype for p in amp.master_params(optimizer)} == {single}
    assert not torch.equal(before, model[0].weight)
    assert len(optimizer._amp_stash.all_fp16_params) == 4


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_closures(level):
    model, optimizer = build(level)
    dtypes = []

    def closure():
        dtypes.append(model(torch.ones(4, 8)).dtype)
        return 5.0

    if level == "O2":
        with pytest.raises(RuntimeError, match="closure"):
            optimizer.step(closure)
        return
    assert optimizer.step(closure) == 5.0
    assert optimizer.step(closure=closure) == 5.0
    assert dtypes == [half, half]  # the step itself runs without casts
    optimizer._amp_stash.skip_next_step(0, 1.0)
    with pytest.raises(RuntimeError, match="overflow"):
        optimizer.step(closure)


def test_step_runs_without_casts():
    seen = []

    class Spy(torch.optim.SGD):
        def step(self, closure=None):
            seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)

    _, optimizer = build("O1", make=Spy)
    optimizer.step()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is half
    assert seen == [single]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("scheduler_first", [True, False])
def test_schedulers_raise_no_warning(level, scheduler_first):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make = lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler = make() if scheduler_first else None
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    scheduler = scheduler or make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(model, optimizer)
        optimizer._amp_stash.skip_next_step(0, 1.0)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_attributes_that_are_taken():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer._prepare_amp_backward = None
    with pytest.raises(RuntimeError, match="_prepare_amp_backward"):
        amp.initialize(model, optimizer, verbosity=0)
    assert model[0].weight.dtype is single
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    properties = opt_levels["O2"](Properties())
    assert _process_optimizer(fresh, properties) is fresh
    with pytest.raises(RuntimeError, match="_amp_stash"):
        _process_optimizer(fresh, properties)
