"""FusedSGD beside torch's own tools: schedulers, hooks, GradScaler, autograd, torch.compile."""

import copy

import pytest
import torch

from apex.optimizers.fused_sgd import FusedSGD
from apex_testkit import assert_as_accurate_as
from apex_testkit.optimizers import run_steps, sgd_reference


@pytest.mark.parametrize("lr_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_learning_rate_may_be_a_tensor(shape, lr_dtype, device):
    for lr_device in {"cpu", str(device)}:
        lr = torch.full(shape, 0.25, dtype=lr_dtype, device=lr_device)
        param = torch.nn.Parameter(torch.ones(3, device=device))
        optimizer = run_steps(FusedSGD, [param], [[torch.ones_like(param)]], lr=lr)
        lr.fill_(0.5)
        optimizer.step()
        assert param.eq(0.25).all()


def test_learning_rate_and_momentum_schedulers_drive_it(device):
    param = torch.nn.Parameter(torch.zeros(3, device=device, dtype=torch.float64))
    twin = torch.nn.Parameter(param.detach().clone())
    pairs = []
    for p, cls in ((param, FusedSGD), (twin, torch.optim.SGD)):
        optimizer = cls([p], lr=0.1, momentum=0.9)
        pairs.append(
            (optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10), p)
        )
    for _ in range(9):
        for optimizer, scheduler, p in pairs:
            p.grad = p.detach().cos()
            optimizer.step()
            scheduler.step()
    torch.testing.assert_close(param, twin)


def test_hooks_and_closure_run(device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = FusedSGD([param], lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        calls.append("closure")
        loss = (param * 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6.0
    assert calls == ["pre", "closure", "post"]
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.8, device=device))


def test_autograd_notices_the_change(device):
    """Backward over values from before the step is an error, not a wrong gradient."""
    param = torch.nn.Parameter(torch.ones(3, device=device))
    loss = param.square().sum()
    param.grad = torch.ones_like(param)
    FusedSGD([param], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_grad_scaler_skips_and_unscales(bad, device):
    value = torch.randn(17, device=device)
    param = torch.nn.Parameter(value.clone())
    optimizer = FusedSGD([param], lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    grads = [torch.randn_like(value) for _ in range(2)]

    def scaled_step(grad):
        scaler.scale(torch.zeros(1, device=device))  # as after a backward of a scaled loss
        param.grad = grad * scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()

    scaled_step(grads[0])
    held = param.detach().clone()
    scaled_step(torch.full_like(value, bad))
    assert torch.equal(param.detach(), held)
    assert scaler.get_scale() == 512.0
    scaled_step(grads[1])
    assert_as_accurate_as(
        lambda p, *g: sgd_reference(p, *g, lr=0.1, momentum=0.9), param.detach(), value, *grads
    )


def test_compiled_training_step_gives_the_same(device):
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.ReLU(), torch.nn.Linear(9, 2))
    model.to(device, torch.float64)
    twin = copy.deepcopy(model)
    ours = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(4, 7, device=device, dtype=torch.float64)

    def train(net, optimizer):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    compiled = torch.compile(train, backend="aot_eager")
    for step in range(5):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        compiled(model, ours)
        train(twin, theirs)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
