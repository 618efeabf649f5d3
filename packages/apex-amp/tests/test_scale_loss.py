"""scale_loss: training at every level, accumulation, overflows, several losses, failures."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp import _amp_state

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
INF = float("inf")


def conv_net():
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3, groups=2, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)),
    )


def mlp():
    return nn.Sequential(nn.Linear(192, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def adam(params, lr):
    return torch.optim.Adam(params, lr=lr, eps=1e-4)  # 1e-8 is 0 in float16


def build(level, model=None, make=torch.optim.SGD, **kwargs):
    model = model or mlp()
    optimizer = make(model.parameters(), lr=0.05)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **kwargs)


def test_python_calls_of_a_step():
    """Of amp's own code, at O1: nothing is asked for each parameter, nor twice."""
    model, optimizer = build("O1", nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    x, calls = torch.randn(2, 8), 0

    def step():
        loss = model(x).float().sum()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def note(frame, event, arg):
        nonlocal calls
        calls += event == "call" and "/apex/amp/" in frame.f_code.co_filename

    for _ in range(3):
        step()
    sys.setprofile(note)
    step()
    sys.setprofile(None)
    assert calls < 100


def set_scale(scale, loss_id=0):
    _amp_state.loss_scalers[loss_id]._loss_scale = scale


def backward(loss, optimizers, **kwargs):
    with amp.scale_loss(loss, optimizers, **kwargs) as scaled_loss:
        scaled_loss.backward()


def poison(*params):
    """Have the next backward pass find an inf in the gradient of each parameter."""

    def poison_one(param):
        def hook(grad):
            handle.remove()
            return grad * INF

        handle = param.register_hook(hook)

    for param in params:
        poison_one(param)


@pytest.mark.parametrize("network", [conv_net, mlp])
@pytest.mark.parametrize("level", LEVELS)
def test_training_reduces_the_loss(level, network, device):
    x, y = torch.randn(32, 3, 8, 8, device=device), torch.arange(32, device=device) % 4
    x = x if network is conv_net else x.flatten(1)
    model, optimizer = build(level, network().to(device))
    losses = []
    for _ in range(25):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.isfinite().all() for p in amp.master_params(optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_those_of_float32(level):
    torch.manual_seed(0)
    reference = mlp()
    model, optimizer = build(level, copy.deepcopy(reference))
    x, y = torch.randn(16, 192), torch.arange(16) % 4
    F.cross_entropy(reference(x), y).backward()
    backward(F.cross_entropy(model(x), y), optimizer)
    # Relative error of whole gradients: inputs and weights are rounded to 8 or 11 bits.
    allowed = {"O0": 1e-6, "O4": 0.05, "O5": 0.05}.get(level, 0.01)
    for expected, param in zip(reference.parameters(), amp.master_params(optimizer), strict=True):
        error = (param.grad.float() - expected.grad).norm() / expected.grad.norm()
        assert error < allowed


@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0, 1.0])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_accumulation_over_backward_passes(level, loss_scale):
    """Several passes before a step give the sum of their gradients, whatever the scales."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(192, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    batches = [(torch.randn(8, 192), torch.arange(8) % 4) for _ in range(3)]

    def grads(passes, **kwargs):
        model, optimizer = build(level, copy.deepcopy(start), loss_scale=loss_scale)
        model.eval()  # running statistics must not differ between the runs
        for i, (x, y) in enumerate(passes):
            backward(
                F.cross_entropy(model(x), y), optimizer, **{k: v[i] for k, v in kwargs.items()}
            )
        return [p.grad for p in amp.master_params(optimizer)]

    single = [grads([batch]) for batch in batches]
    expected = [sum(g[i].double() for g in single) for i in range(len(single[0]))]
    assert len(expected) == 6
    for actual, total in zip(grads(batches), expected, strict=True):
        torch.testing.assert_close(actual.double(), total, rtol=1e-5, atol=1e-6)
    delayed = grads(batches, delay_unscale=[True, True, False])
    for actual, total in zip(delayed, expected, strict=True):
        # Autograd adds in the parameters' dtype.
        scale = {"O2": 2e-3, "O5": 2e-2}.get(level, 1e-5)
        torch.testing.assert_close(actual.double(), total, rtol=scale, atol=scale)


def snapshot(model, optimizer):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["masters"] = [p.detach() for p in amp.master_params(optimizer)]
    return copy.deepcopy(state)


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("make", [torch.optim.SGD, adam])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_overflow_skips_one_step_and_changes_nothing(level, make, capsys):
    model, optimizer = build(level, make=make, loss_scale="dynamic")
    _amp_state.verbosity = 1
    x, y = torch.randn(8, 192), torch.arange(8) % 4

    def iterate(bad=False):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if bad:
            poison(model[0].weight)
        backward(loss, optimizer)
        optimizer.step()

    set_scale(1024.0)
    iterate()
    before = snapshot(model, optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 1024.0, "unskipped": 1}
    for scale in (512.0, 256.0):
        iterate(bad=True)
        assert_same(snapshot(model, optimizer), before)
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": scale, "unskipped": 0}
        out = capsys.readouterr().out
        assert "loss scaler 0" in out
        assert str(scale) in out
    iterate()
    assert not torch.equal(snapshot(model, optimizer)["masters"][0], before["masters"][0])


def test_a_large_finite_gradient_is_no_overflow():
    weight = nn.Parameter(torch.ones(1000))
    model = nn.Module()
    model.weight = weight
    optimizer = torch.optim.SGD([weight], lr=0.0)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    set_scale(1.0)
    backward((weight * 1e38).sum(), optimizer)
    assert not optimizer._amp_stash.already_patched
    assert weight.grad[0].item() == pytest.approx(1e38)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("bad_pass", [0, 1, 2])
def test_an_overflow_in_any_pass_skips_the_step(level, bad_pass):
    model, optimizer = build(level)
    x, y = torch.randn(8, 192), torch.arange(8) % 4
    before = snapshot(model, optimizer)
    for i in range(3):
        loss = F.cross_entropy(model(x), y)
        if i == bad_pass:
            poison(model[0].weight)
        backward(loss, optimizer)
    optimizer.step()
    assert_same(snapshot(model, optimizer), before)
    assert not optimizer._amp_stash.already_patched


def test_delayed_overflow_check_is_made_by_the_next_block():
    model, optimizer = build("O1")
    x, y = torch.randn(8, 192), torch.arange(8) % 4
    before = snapshot(model, optimizer)
    loss = F.cross_entropy(model(x), y)
    poison(model[0].weight)
    backward(loss, optimizer, delay_overflow_check=True)
    assert not optimizer._amp_stash.already_patched
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 65536.0, "unskipped": 0}
    backward(F.cross_entropy(model(x), y), optimizer)
    assert optimizer._amp_stash.already_patched
    optimizer.step()
    assert_same(snapshot(model, optimizer), before)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_two_models_two_optimizers_three_losses(level):
    """Losses 0 and 2 belong to one model each, loss 1 to both; only its overflow skips both."""
    models = [nn.Linear(16, 4), nn.Linear(16, 4)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    models, optimizers = amp.initialize(
        models, optimizers, opt_level=level, num_losses=3, verbosity=0, loss_scale="dynamic"
    )
    x, y = torch.randn(8, 16), torch.arange(8) % 4
    for bad, skipped in ((None, ()), (0, (0,)), (1, (0, 1)), (2, (1,))):
        before = [snapshot(m, o) for m, o in zip(models, optimizers, strict=True)]
        scales = [s.loss_scale() for s in _amp_state.loss_scalers]
        for loss_id, used in enumerate(([0], [0, 1], [1])):
            loss = sum(F.cross_entropy(models[i](x), y) for i in used)
            if loss_id == bad:
                poison(*(models[i].weight for i in used))
            chosen = [optimizers[i] for i in used]
            backward(loss, chosen if len(chosen) > 1 else chosen[0], loss_id=loss_id)
        for i, optimizer in enumerate(optimizers):
            assert optimizer._amp_stash.already_patched == (i in skipped)
            optimizer.step()
            optimizer.zero_grad()
            changed = not torch.equal(
                before[i]["masters"][0], next(amp.master_params(optimizer)).detach()
            )
            assert changed == (i not in skipped)
        for loss_id, scaler in enumerate(_amp_state.loss_scalers):
            assert scaler.loss_scale() == scales[loss_id] / (2 if loss_id == bad else 1)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_a_failing_block_leaves_gradients_as_they_were(level):
    model, optimizer = build(level, loss_scale="dynamic")
    set_scale(256.0)
    x, y = torch.randn(8, 192), torch.arange(8) % 4
    backward(F.cross_entropy(model(x), y), optimizer)
    before = [p.grad.clone() for p in amp.master_params(optimizer)]
    state = amp.state_dict()

    def fail_after_backward():
        with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled_loss:
            scaled_loss.backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_after_backward()
    after = [p.grad for p in amp.master_params(optimizer)]
    assert_same(after, before)
    assert amp.state_dict() == state
    assert _amp_state.handle.is_active() == (level == "O1")
    assert torch.is_autocast_enabled("cpu") == (level == "O1")
    backward(F.cross_entropy(model(x), y), optimizer)
    for new, old in zip(amp.master_params(optimizer), before, strict=True):
        torch.testing.assert_close(new.grad, 2 * old, rtol=2e-2, atol=1e-3)
