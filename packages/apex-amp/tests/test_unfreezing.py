"""Parameters that are frozen for a while, and the optimizer's state of them."""

import copy

import pytest
import torch
from torch import nn

from apex import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def build(level, make, frozen=False, model=None):
    model = model or network()
    model[0].requires_grad_(not frozen)
    options = {"verbosity": 0, "loss_scale": 8.0}
    return amp.initialize(model, make(model.parameters()), opt_level=level, **options)


def step(model, optimizer):
    optimizer.zero_grad()
    x = torch.arange(8.0).view(2, 4) / 8
    with amp.scale_loss(model(x).float().pow(2).mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def saved(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def assert_same_state(actual, expected):
    assert actual.keys() == expected.keys()
    for key, entry in expected.items():
        for name, value in entry.items():
            if isinstance(value, torch.Tensor):
                assert actual[key][name].dtype is value.dtype, name
                assert torch.equal(actual[key][name], value), name


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_state_of_frozen_parameters_stays_exact(level, make_optimizer):
    """Resumed with a frozen part, saved and resumed again, it is the state that was saved first."""
    model, optimizer = build(level, make_optimizer)
    for _ in range(2):
        step(model, optimizer)
    weights, state = saved(model, optimizer)
    for _ in range(2):
        model, optimizer = build(level, make_optimizer, frozen=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))  # torch's optimizers take tensors over
        assert_same_state(optimizer.state_dict()["state"], state["state"])
        weights, state = saved(model, optimizer)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])  # at O3 Adam's 1e-8 is 0
def test_resumed_frozen_and_unfrozen_later(level, make_optimizer):
    """The next step is the one of a process that resumed without freezing anything."""
    model, optimizer = build(level, make_optimizer)
    step(model, optimizer)
    weights, state = saved(model, optimizer)

    model, optimizer = build(level, make_optimizer)
    model.load_state_dict(weights)
    optimizer.load_state_dict(copy.deepcopy(state))
    step(model, optimizer)
    expected = saved(model, optimizer)

    model, optimizer = build(level, make_optimizer, frozen=True)
    model.load_state_dict(weights)
    optimizer.load_state_dict(copy.deepcopy(state))
    optimizer.zero_grad()
    model[0].requires_grad_(True)
    step(model, optimizer)
    actual = saved(model, optimizer)
    for name, value in expected[0].items():
        assert torch.equal(actual[0][name], value), name
    assert_same_state(actual[1]["state"], expected[1]["state"])


@pytest.mark.parametrize("level", LEVELS)
def test_state_of_before_initialize(level, make_optimizer):
    model = network()
    optimizer = make_optimizer(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    model, optimizer = build(level, lambda params: optimizer, frozen=True, model=model)
    if level in ("O2", "O5"):
        optimizer.zero_grad()  # masters are made
        assert_same_state(optimizer.state_dict()["state"], before)
    step(model, optimizer)
    weight = model[0].weight.clone()
    model[0].requires_grad_(True)
    for _ in range(2):
        step(model, optimizer)
    assert not torch.equal(weight, model[0].weight)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_refused_state_changes_nothing(level):
    model, optimizer = build(level, torch.optim.Adam, frozen=True)
    step(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    other = torch.optim.Adam(nn.Linear(1, 1).parameters())
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(other.state_dict())
    assert_same_state(optimizer.state_dict()["state"], before["state"])
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    step(model, optimizer)
