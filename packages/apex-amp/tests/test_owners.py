"""A parameter of an optimizer that is still in use goes to no second one, if one has masters."""

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp import _amp_state

MASTERS = ("O2", "O5")


def sgd(params):
    return torch.optim.SGD(params, lr=0.5)


def init(models, optimizers, level="O2"):
    return amp.initialize(models, optimizers, opt_level=level, verbosity=0, loss_scale=8.0)


def backward(model, optimizer):
    with amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()


@pytest.fixture(params=MASTERS)
def first(request):
    """A model and its optimizer, which a scheduler holds, too."""
    model, optimizer = init(model := nn.Linear(4, 4), sgd(model.parameters()), request.param)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_second_optimizer_is_refused(first, level, stepped):
    model, optimizer, _ = first
    if stepped:
        backward(model, optimizer)
        optimizer.step()
    second, state = sgd(model.parameters()), dict(_amp_state.__dict__)
    with pytest.raises(
        RuntimeError, match=r"optimizers\[0\]\.param_groups\[0\]\['params'\]\[0\] be"
    ):
        init(nn.Linear(2, 2), second, level)
    assert _amp_state.__dict__ == state
    assert not hasattr(second, "_amp_stash")
    backward(model, optimizer)
    optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_nor_does_a_group_bring_it(first, level):
    model, optimizer, _ = first
    other, second = init(other := nn.Linear(4, 4), sgd(other.parameters()), level)
    groups = len(second.param_groups)
    with pytest.raises(RuntimeError, match=r"param_group\['params'\]\[1\] belongs to another SGD"):
        second.add_param_group({"params": [nn.Parameter(torch.ones(2)), model.weight]})
    assert len(second.param_groups) == groups
    second.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_a_float32_parameter_counts_as_well():
    model = nn.BatchNorm1d(4)
    model, optimizer = init(model, sgd(model.parameters()))
    with pytest.raises(RuntimeError, match="still in use"):
        init(model, sgd(model.parameters()))
    assert optimizer._amp_stash.has_masters


def test_an_optimizer_that_was_dropped_owns_nothing(first):
    """Also before Python has collected it: methods that amp adds refer to their optimizer."""
    model, optimizer, scheduler = first
    backward(model, optimizer)
    optimizer.step()
    del optimizer, scheduler
    params = list(model.parameters())
    del first
    _amp_state.allow_incoming_model_not_fp32 = True
    with pytest.raises(RuntimeError, match="still in use"):
        init(model, sgd(params))  # the fixture holds it


def test_dropped_for_good():
    model = nn.BatchNorm1d(4)
    for _ in range(3):
        model, optimizer = init(model, sgd(model.parameters()))
        before = model.bias.clone()
        backward(model, optimizer)
        optimizer.step()
        assert not torch.equal(before, model.bias)
        del optimizer


def test_without_masters_optimizers_may_share():
    """They unscale a gradient in place, whoever steps on it."""
    model, first = init(model := nn.Linear(4, 4), sgd(model.parameters()), "O1")
    model, second = init(model, sgd(model.parameters()), "O1")
    backward(model, [first, second])
    assert torch.equal(model.bias.grad, torch.full((4,), 2.0))
