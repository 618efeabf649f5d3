"""Several scale_loss blocks before a step: their order, nesting, failures and delayed checks."""

import itertools

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp import _amp_state

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
ORDERS = [(*first, False) for first in itertools.product([False, True], repeat=3)]


def build(level, make=torch.optim.SGD, count=1, **kwargs):
    """Models and optimizers; a batch norm that stays float32 at O2 and O5."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval() for _ in range(count)]
    optimizers = [make(model.parameters(), lr=0.125) for model in models]
    options = {"loss_scale": 8.0, "verbosity": 0, **kwargs}
    models, optimizers = amp.initialize(models, optimizers, opt_level=level, **options)
    return (models[0], optimizers[0]) if count == 1 else (models, optimizers)


def loss_of(model, factor=1.0):
    x = torch.arange(8.0).view(2, 4) / 8
    return (model(x).float() * torch.arange(1.0, 5.0) / 4).sum() * factor


def backward(loss, optimizers, **kwargs):
    with amp.scale_loss(loss, optimizers, **kwargs) as scaled_loss:
        scaled_loss.backward()


def grads(model, optimizer):
    stash = optimizer._amp_stash
    if getattr(optimizer, "materialize_master_grads", True) or not stash.has_masters:
        return [p.grad.clone().float() for p in amp.master_params(optimizer)]
    return [p.grad.float() / optimizer.most_recent_scale for p in model.parameters()]


def assert_multiple(actual, single, factor):
    for a, s in zip(actual, single, strict=True):
        assert (a - factor * s).norm() <= 0.02 * (factor * s).norm()  # bfloat16 sums


@pytest.mark.parametrize("level", LEVELS)
def test_any_order_of_delayed_passes(level, make_optimizer):
    model, optimizer = build(level, make_optimizer)
    backward(loss_of(model), optimizer)
    single = grads(model, optimizer)
    for order in ORDERS:
        model, optimizer = build(level, make_optimizer)
        for i, delay in enumerate(order):
            backward(loss_of(model, i + 1), optimizer, delay_unscale=delay)
        assert_multiple(grads(model, optimizer), single, 10)
        assert not optimizer._amp_stash.params_have_scaled_gradients
        assert not optimizer._amp_stash.is_prepared


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_delayed_passes_that_are_given_up(level, set_to_none):
    """zero_grad after them, as after an exception in a later one: the next pass is alone."""
    model, optimizer = build(level)
    backward(loss_of(model), optimizer)
    single = grads(model, optimizer)
    backward(loss_of(model), optimizer, delay_unscale=True)
    optimizer.zero_grad(set_to_none=set_to_none)
    backward(loss_of(model), optimizer)
    assert_multiple(grads(model, optimizer), single, 1)


@pytest.mark.parametrize("level", LEVELS)
def test_a_delayed_pass_that_does_not_reach_an_optimizer(level):
    models, optimizers = build(level, count=2)
    for model, optimizer in zip(models, optimizers, strict=True):
        backward(loss_of(model), optimizer)
    single = [grads(m, o) for m, o in zip(models, optimizers, strict=True)]
    backward(loss_of(models[0]), optimizers, delay_unscale=True)
    backward(loss_of(models[0]) + loss_of(models[1]), optimizers)
    for i, factor in enumerate((3, 2)):
        assert_multiple(grads(models[i], optimizers[i]), single[i], factor)


@pytest.mark.parametrize("level", LEVELS)
def test_a_failing_delayed_pass(level, make_optimizer):
    """The first one leaves gradients as they were before it."""
    model, optimizer = build(level, make_optimizer)
    backward(loss_of(model), optimizer)
    single = grads(model, optimizer)

    def fail():
        with amp.scale_loss(loss_of(model), optimizer, delay_unscale=True) as scaled_loss:
            scaled_loss.backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    backward(loss_of(model), optimizer, delay_unscale=True)
    backward(loss_of(model), optimizer)
    assert_multiple(grads(model, optimizer), single, 3)


@pytest.mark.parametrize("delays", [(False, False), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_nested_blocks_of_one_optimizer_are_refused(level, delays):
    model, optimizer = build(level, num_losses=2)
    backward(loss_of(model), optimizer)
    single = grads(model, optimizer)

    def nest():
        with (
            amp.scale_loss(loss_of(model), optimizer, delay_unscale=delays[0]) as outer,
            amp.scale_loss(loss_of(model), [optimizer], 1, delay_unscale=delays[1]) as inner,
        ):
            (outer + inner).backward()

    with pytest.raises(RuntimeError, match=r"optimizers\[0\] \(SGD\) is in a scale_loss block"):
        nest()
    backward(loss_of(model), optimizer)
    assert_multiple(grads(model, optimizer), single, 2)


@pytest.mark.parametrize("level", LEVELS)
def test_nested_blocks_of_two_optimizers(level):
    models, optimizers = build(level, count=2, num_losses=2)
    for model, optimizer in zip(models, optimizers, strict=True):
        backward(loss_of(model), optimizer)
    single = [grads(m, o) for m, o in zip(models, optimizers, strict=True)]
    with (
        amp.scale_loss(loss_of(models[0]), optimizers[0], loss_id=0) as first,
        amp.scale_loss(loss_of(models[1]), optimizers[1], loss_id=1) as second,
    ):
        (first + second).backward()
    for i in range(2):
        assert_multiple(grads(models[i], optimizers[i]), single[i], 2)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_refused_optimizer_costs_no_gradients(level):
    """The second of two has a parameter that amp does not take."""
    model = nn.Linear(4, 4)
    good = torch.optim.SGD(model.parameters(), lr=0.1)
    bad = torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1)
    options = {"loss_scale": 8.0, "verbosity": 0}
    amp.initialize(model, [good, bad], opt_level=level, **options)
    x = torch.ones(2, 4)
    backward(model(x).float().sum(), good)
    before = [p.grad.clone() for p in amp.master_params(good)]
    with pytest.raises(TypeError, match="complex64"):
        backward(model(x).float().sum(), [good, bad])
    for param, grad in zip(amp.master_params(good), before, strict=True):
        assert torch.equal(param.grad, grad)
    backward(model(x).float().sum(), good)
    for param, grad in zip(amp.master_params(good), before, strict=True):
        assert torch.equal(param.grad, 2 * grad)


def first_weights(optimizers):
    return [next(amp.master_params(o)).detach().clone() for o in optimizers]


@pytest.mark.parametrize("bad", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_delayed_check_concerns_its_own_optimizer(level, bad, make_optimizer):
    models, optimizers = build(level, make_optimizer, count=2, loss_scale="dynamic")
    _amp_state.loss_scalers[0]._loss_scale = 256.0
    before = first_weights(optimizers)
    for i, delay in enumerate((True, False)):
        loss = loss_of(models[i], float("inf") if i in bad else 1.0)
        backward(loss, optimizers[i], delay_overflow_check=delay)
    for optimizer in optimizers:
        optimizer.step()
    for i, (old, new) in enumerate(zip(before, first_weights(optimizers), strict=True)):
        assert torch.equal(old, new) == (i in bad)
        assert not optimizers[i]._amp_stash.already_patched
    assert _amp_state.loss_scalers[0].loss_scale() == (128.0 if bad else 256.0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_delayed_check_that_comes_after_the_step(level):
    """It cannot undo that step, and must not skip the next one."""
    models, optimizers = build(level, count=2, loss_scale="dynamic")
    _amp_state.loss_scalers[0]._loss_scale = 256.0
    backward(loss_of(models[0], float("inf")), optimizers[0], delay_overflow_check=True)
    optimizers[0].step()
    backward(loss_of(models[1]), optimizers[1])
    assert _amp_state.loss_scalers[0].loss_scale() == 128.0
    assert not any(optimizer._amp_stash.already_patched for optimizer in optimizers)


def test_a_skipped_step_says_so_in_apexs_words(capsys):
    """Logs are searched for them."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    with amp.scale_loss(model(torch.full((1, 2), torch.inf)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    expected = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
    assert capsys.readouterr().out.endswith(expected)
