"""The interface before amp.initialize: handles of amp.init, and the optimizers they wrap."""

import copy

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp import _amp_state
from apex.amp.handle import NoOpHandle
from apex.amp.opt import OptimWrapper

INF = float("inf")


def build(num_loss=1, make=torch.optim.SGD, scale=256.0, **kwargs):
    torch.manual_seed(0)
    handle = amp.init(**kwargs)
    model = nn.Linear(8, 4)
    optimizer = handle.wrap_optimizer(make(model.parameters(), lr=0.1), num_loss=num_loss)
    for scaler in optimizer._loss_scaler:
        scaler._loss_scale = scale
    return handle, model, optimizer


def backward(optimizer, loss):
    with optimizer.scale_loss(loss) as scaled_loss:
        scaled_loss.backward()


def loss_of(model, seed=0):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    return model(x).float().square().mean()


@pytest.mark.parametrize("patch_type", [torch.float16, torch.bfloat16], ids=str)
def test_training(patch_type):
    _, model, optimizer = build(patch_type=patch_type, make=torch.optim.Adam)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = loss_of(model)
        backward(optimizer, loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert optimizer._loss_scaler[0]._unskipped == 10


@pytest.mark.parametrize("num_loss", [1, 3])
def test_losses_add_up_at_scales_of_their_own(num_loss):
    _, model, optimizer = build(num_loss)
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for seed in range(num_loss):
        grads = torch.autograd.grad(loss_of(model, seed) * 256.0, list(model.parameters()))
        expected = [e + g / 256.0 for e, g in zip(expected, grads, strict=True)]
    for seed, scaler in enumerate(optimizer._loss_scaler):
        scaler._loss_scale = 64.0 * 4**seed
    assert len({id(scaler) for scaler in optimizer._loss_scaler}) == num_loss
    for seed in range(num_loss):
        with optimizer.scale_loss(loss_of(model, seed)) as scaled_loss:
            assert scaled_loss.item() == pytest.approx(
                64.0 * 4**seed * loss_of(model, seed).item(), rel=1e-3
            )
            scaled_loss.backward()
    for param, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=1e-3, atol=1e-4)  # 16-bit gradients


def test_gradients_of_before_are_kept():
    _, model, optimizer = build()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    backward(optimizer, 0.0 * loss_of(model))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_in_any_loss_skips_one_step(bad, capsys):
    _, model, optimizer = build(num_loss=2, make=torch.optim.Adam)
    before = copy.deepcopy(model.state_dict())
    for index in range(2):
        backward(optimizer, loss_of(model) * (INF if index == bad else 1.0))
    assert optimizer.step() is None
    out = capsys.readouterr().out
    assert f"Skipping step, loss scaler {bad}" in out
    assert "128.0" in out
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert len(optimizer.state) == 0
    assert [s.loss_scale() for s in optimizer._loss_scaler][bad] == 128.0
    assert [s.loss_scale() for s in optimizer._loss_scaler][1 - bad] == 256.0
    optimizer.zero_grad()
    for _ in range(2):
        backward(optimizer, loss_of(model))
    optimizer.step()
    assert not torch.equal(model.weight, before["weight"])


def test_a_failing_block_leaves_gradients_as_they_were():
    _, model, optimizer = build()

    def fail():
        with optimizer.scale_loss(loss_of(model)) as scaled_loss:
            scaled_loss.backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert model.weight.grad is None
    assert optimizer._loss_idx == 0
    backward(optimizer, loss_of(model))


def test_step_and_backward_run_without_casts():
    seen = []

    class Spy(torch.optim.SGD):
        def step(self, closure=None):
            seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)

    handle, model, optimizer = build(make=Spy)
    handle.cache[model.weight] = model.weight.half()
    with optimizer.scale_loss(loss_of(model)):
        seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
    assert model.weight not in handle.cache
    handle.cache[model.weight] = model.weight.half()
    optimizer.step()
    assert seen == [torch.float32] * 2
    assert handle.cache == {}
    assert handle.is_active()


def test_refusals():
    handle, model, optimizer = build()
    with pytest.raises(NotImplementedError, match="closure"):
        optimizer.step(lambda: 1.0)
    backward(optimizer, loss_of(model))
    with pytest.raises(RuntimeError, match="num_loss=1"):
        backward(optimizer, loss_of(model))
    for num_loss in (0, 1.5):
        with pytest.raises(ValueError, match="num_loss must be a positive int"):
            handle.wrap_optimizer(optimizer, num_loss)
    with pytest.raises(RuntimeError, match="wrap_optimizer again"):
        copy.copy(optimizer)


def test_the_rest_is_the_optimizers():
    _, model, optimizer = build()
    inner = optimizer._optimizer
    assert isinstance(optimizer, OptimWrapper)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.defaults is inner.defaults
    assert repr(optimizer) == repr(inner)
    assert optimizer.__getstate__().keys() == inner.__getstate__().keys()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 3.0})
    assert inner.param_groups[1]["lr"] == 3.0
    state = optimizer.state_dict()
    assert state == inner.state_dict()
    state["param_groups"][0]["lr"] = 7.0
    optimizer.load_state_dict(state)
    assert inner.param_groups[0]["lr"] == 7.0
    optimizer.__setstate__(inner.__getstate__())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.zero_grad(set_to_none=False)
    assert model.weight.grad.abs().sum() == 0
    optimizer.zero_grad()
    assert model.weight.grad is None
    with pytest.raises(AttributeError, match="no_such_name"):
        optimizer.no_such_name  # noqa: B018


@pytest.mark.parametrize("how", ["disabled", "deactivated", "without casts"])
def test_where_casts_are_off_nothing_is_scaled(how):
    handle = NoOpHandle() if how == "disabled" else amp.init()
    model = nn.Linear(8, 4)
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if how == "deactivated":
        handle._deactivate()
    loss = loss_of(model)
    with handle._disable_casts() if how == "without casts" else amp.disable_casts():
        for _ in range(3):  # losses are not counted
            with optimizer.scale_loss(loss) as scaled_loss:
                assert scaled_loss is loss
        assert optimizer.step(lambda: 5.0) == 5.0


def test_handles_can_cache():
    handle = amp.init()
    param = nn.Parameter(torch.ones(2))
    handle.cache[param] = param.half()
    handle.remove_cache(param)
    handle.remove_cache(param)
    assert handle.cache == {}
    handle.cache[param] = param.half()
    handle._clear_cache()
    assert handle.cache == {}
    assert handle.has_cache
    assert _amp_state.handle is handle
