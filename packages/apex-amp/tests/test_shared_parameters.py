"""A parameter that occurs twice: in a group, in two optimizers, in an optimizer given twice."""

import copy
import itertools

import pytest
import torch
from torch import nn

from apex import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
NO_MASTERS = ("O0", "O1", "O3", "O4")
IGNORED = pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")


def initialize(model, optimizers, level, **kwargs):
    options = {"loss_scale": 8.0, "verbosity": 0, **kwargs}
    return amp.initialize(model, optimizers, opt_level=level, **options)


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 4, bias=False)


def loss_of(model):
    return (model(torch.arange(8.0).view(2, 4) / 8).float() * torch.arange(1.0, 5.0) / 4).sum()


def backward(loss, optimizers, **kwargs):
    with amp.scale_loss(loss, optimizers, **kwargs) as scaled_loss:
        scaled_loss.backward()


def grad(optimizer):
    param = next(amp.master_params(optimizer))
    if param.grad is None:  # FusedSGD that unscales
        param = optimizer._amp_stash.all_fp16_params[0]
        return param.grad.float() / optimizer.most_recent_scale
    return param.grad.clone()


def single_grad(level):
    model, optimizer = initialize(model := linear(), sgd(model), level)
    backward(loss_of(model), optimizer)
    return grad(optimizer)


def sgd(model, **kwargs):
    return torch.optim.SGD(model.parameters(), lr=0.125, **kwargs)


@IGNORED
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("level", LEVELS)
def test_twice_in_a_group(level, make):
    """As tied weights in lists of parameters that were put together; fused optimizers refuse it."""
    single = single_grad(level)
    model = linear()
    optimizer = make([model.weight, model.weight], lr=0.125)
    model, optimizer = initialize(model, optimizer, level)
    for passes in (1, 2):
        backward(loss_of(model), optimizer)
        assert torch.equal(grad(optimizer), passes * single)
    params = list(amp.master_params(optimizer))
    assert len(params) == 2
    assert params[0] is params[1]


@IGNORED
@pytest.mark.parametrize("level", LEVELS)
def test_steps_on_a_parameter_that_is_twice_in_a_group(level):
    """As in plain torch, which steps on it twice."""

    def train(level, model):
        optimizer = torch.optim.SGD([model.weight, model.weight], lr=0.125)
        model, optimizer = initialize(model, optimizer, level)
        for _ in range(2):
            optimizer.zero_grad()
            backward(loss_of(model), optimizer)
            optimizer.step()
        return next(amp.master_params(optimizer)).float()

    error = train(level, linear()) - train("O0", linear())
    assert error.norm() < 0.02


@IGNORED
@pytest.mark.parametrize("level", LEVELS)
def test_twice_in_an_added_group(level):
    single = single_grad(level)
    model, optimizer = initialize(linear(), sgd(nn.Linear(1, 1)), level)
    optimizer.add_param_group({"params": [model.weight, model.weight]})
    backward(loss_of(model), optimizer)
    (first, second) = optimizer.param_groups[1]["params"]
    assert first is second
    assert torch.equal(first.grad, single)
    with pytest.raises(ValueError, match="some parameters appear in more than one"):
        optimizer.add_param_group({"params": [model.weight]})


@IGNORED
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_twice_in_a_group_and_unfrozen(level):
    single = single_grad(level)
    model = linear().requires_grad_(False)
    other = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([model.weight, model.weight, other], lr=0.125)
    model, optimizer = initialize(model, optimizer, level)
    backward((other * 0).sum(), optimizer)
    model.requires_grad_(True)
    backward(loss_of(model), optimizer)
    assert torch.equal(grad(optimizer), single)
    assert len(optimizer._amp_stash.all_fp16_params) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_given_twice(level, make_optimizer):
    single = single_grad(level)
    model, optimizer = initialize(model := linear(), make_optimizer(model.parameters()), level)
    backward(loss_of(model), [optimizer, optimizer])
    assert torch.equal(grad(optimizer), single)


@pytest.mark.parametrize("delays", list(itertools.product([False, True], repeat=2)), ids=str)
@pytest.mark.parametrize("level", NO_MASTERS)
def test_two_optimizers(level, delays, make_optimizer):
    """In one block, and in blocks that have one or both of them, in any order."""
    single = single_grad(level)
    for used in itertools.product([(0,), (1,), (0, 1), (1, 0)], repeat=2):
        model = linear()
        optimizers = [make_optimizer(model.parameters()), sgd(model)]
        model, optimizers = initialize(model, optimizers, level)
        for which, delay in zip(used, delays, strict=True):
            if not set(which) <= set(used[-1]):
                break  # who delays has to unscale
            backward(loss_of(model), [optimizers[i] for i in which], delay_unscale=delay)
        else:
            backward(loss_of(model), [optimizers[i] for i in used[-1]])
            assert torch.equal(model.weight.grad.float(), 3 * single), (used, delays)


@pytest.mark.parametrize("level", NO_MASTERS)
def test_a_failing_block_of_two_optimizers(level):
    single = single_grad(level)
    model = linear()
    model, optimizers = initialize(model, [sgd(model), sgd(model)], level)
    backward(loss_of(model), optimizers)

    def fail():
        with amp.scale_loss(loss_of(model), optimizers) as scaled_loss:
            scaled_loss.backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert torch.equal(model.weight.grad, single)


@pytest.mark.parametrize("level", NO_MASTERS)
def test_two_optimizers_by_turns(level):
    def train(level):
        model = linear()
        optimizers = [sgd(model), sgd(model)]
        model, optimizers = initialize(model, optimizers, level)
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
                backward(loss_of(model), optimizer)
                optimizer.step()
        return model.weight.detach().float()

    start = linear().weight.detach()
    moved, expected = train(level) - start, train("O0") - start
    assert (moved - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_two_optimizers_with_masters_are_refused(level):
    """Each would have a master of its own. Nothing is changed then."""
    model = linear()
    model.requires_grad_(False)
    other = nn.Linear(1, 1)
    optimizers = [sgd(other), sgd(model), torch.optim.SGD([*other.parameters(), model.weight])]
    state = copy.deepcopy(model.state_dict())
    text = r"optimizers\[2\].param_groups\[0\]\['params'\]\[0\] is also in optimizers\[0\]"
    with pytest.raises(RuntimeError, match=text):
        initialize([model, other], optimizers, level)
    assert model.weight.dtype is torch.float32
    assert torch.equal(model.weight, state["weight"])
    assert not any(hasattr(optimizer, "_amp_stash") for optimizer in optimizers)
    initialize([model, other], optimizers[:2], level)
