"""A 16-bit parameter has the masters of one FP16_Optimizer: the newest that was built over it."""

import copy

import pytest
import torch
from torch import nn

from apex.fp16_utils import FP16_Optimizer


def wrap(params, lr=0.5):
    return FP16_Optimizer(torch.optim.SGD(params, lr=lr), static_loss_scale=8.0, verbose=False)


def step(model, optimizer):
    optimizer.zero_grad()
    optimizer.backward(model(torch.ones(2, 4).half()).float().sum())
    optimizer.step()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()


USES = {
    "backward": lambda model, old: old.backward(model(torch.ones(2, 4).half()).float().sum()),
    "update_master_grads": lambda model, old: old.update_master_grads(),
    "step": lambda model, old: old.step(),
}


@pytest.mark.parametrize("use", USES)
def test_the_older_one_is_refused(model, use):
    old = wrap(model.parameters())
    step(model, old)
    new = wrap(model[1].parameters())  # one parameter in common is enough
    step(model, new)
    before, grads = values(model), [copy.copy(p.grad) for p in model.parameters()]
    with pytest.raises(RuntimeError, match=rf"FP16_Optimizer\.{use}: .* newer FP16_Optimizer"):
        USES[use](model, old)
    assert all(map(torch.equal, values(model), before))
    for param, grad in zip(model.parameters(), grads, strict=True):
        assert (param.grad is None) == (grad is None)
        assert grad is None or torch.equal(param.grad, grad)
    step(model, new)


def test_what_is_assigned_anew_trains_as_a_first_one(model):
    twin = copy.deepcopy(model)
    optimizer = wrap(model.parameters())
    optimizer = wrap(model.parameters())
    reference = wrap(twin.parameters())
    for _ in range(3):
        step(model, optimizer)
        step(twin, reference)
    assert all(map(torch.equal, values(model), values(twin)))


def test_parts_of_a_model_have_optimizers_of_their_own(model):
    halves = [wrap(layer.parameters()) for layer in model]
    for _ in range(2):
        for own in halves:
            before = values(model)
            step(model, own)
            assert not all(map(torch.equal, values(model), before))


def test_an_optimizer_that_could_not_be_built_takes_nothing(model):
    optimizer = wrap(model.parameters())
    with pytest.raises(TypeError, match="float64"):
        wrap([*model.parameters(), nn.Parameter(torch.ones(2).double())])
    step(model, optimizer)


def test_parameters_that_are_unfrozen_later_are_taken_too(model):
    model[1].requires_grad_(False)
    optimizer = wrap(model.parameters())
    other = wrap(model[1].parameters())
    model[1].requires_grad_(True)
    step(model, optimizer)
    step(model, other)  # which makes its masters only now
    with pytest.raises(RuntimeError, match=r"FP16_Optimizer\.backward: .* newer"):
        step(model, optimizer)


def test_float32_parameters_have_no_masters_to_undo():
    layer = nn.Linear(4, 4)
    first, second = wrap(layer.parameters()), wrap(layer.parameters())
    for optimizer in (first, second, first):
        optimizer.zero_grad()
        optimizer.backward(layer(torch.ones(2, 4)).sum())
        optimizer.step()
