"""All optimizers as torch.optim.Optimizer: hooks, schedulers, scalers, closures, compile, DCP."""

import copy
import weakref

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import apex.optimizers
from apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

MAKERS = {
    "FusedAdagrad": lambda p, lr=0.1: FusedAdagrad(p, lr=lr, weight_decay=0.1),
    "FusedAdam": lambda p, lr=0.1: FusedAdam(p, lr=lr, weight_decay=0.1),
    "FusedLAMB": lambda p, lr=0.1: FusedLAMB(p, lr=lr, weight_decay=0.1),
    "FusedLARS": lambda p, lr=0.1: FusedLARS(p, lr=lr, momentum=0.9, weight_decay=0.1),
    "FusedMixedPrecisionLamb": lambda p, lr=0.1: FusedMixedPrecisionLamb(p, lr=lr),
    "FusedNovoGrad": lambda p, lr=0.1: FusedNovoGrad(p, lr=lr, weight_decay=0.1),
    "FusedSGD": lambda p, lr=0.1: FusedSGD(p, lr=lr, momentum=0.9, weight_decay=0.1),
}
all_optimizers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def make_params(device, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(n, device=device, dtype=dtype)) for n in (5, 65, 300)]


def twins(make, device):
    ours = make_params(device)
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    return ours, make(ours), theirs, make(theirs)


def set_grads(*lists, scale=1.0):
    for own in zip(*lists, strict=True):
        grad = torch.randn_like(own[0])
        for param in own:
            param.grad = grad * scale


def assert_same(ours, theirs):
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


def test_every_optimizer_is_here():
    assert set(MAKERS) == {*apex.optimizers.__all__} - {"CPUOffload"}


@all_optimizers
def test_gradients_are_freed_when_they_are_set_to_none(make, device):
    """Kept until the next step, they would stand in memory beside those of the next backward."""
    params = make_params(device)
    optimizer = make(params)
    for _ in range(4):
        set_grads(params)
        optimizer.step()
        watched = [weakref.ref(p.grad) for p in params]
        optimizer.zero_grad(set_to_none=True)
        assert [ref() for ref in watched] == [None] * len(params)


@all_optimizers
def test_a_parameter_stands_in_an_optimizer_once(make, device):
    first, second, _ = make_params(device)
    with (
        pytest.warns(UserWarning, match="duplicate"),
        pytest.raises(ValueError, match=r"params\[2\] is params\[0\]"),
    ):
        make([first, second, first])
    optimizer = make([first])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [second, first]})
    assert len(optimizer.param_groups) == 1


@all_optimizers
def test_hooks_and_closures(make, device):
    params, seen = make_params(device), []
    optimizer = make(params)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure():
        assert torch.is_grad_enabled()
        seen.append("closure")
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    values = [p.detach().clone() for p in params]
    loss = optimizer.step(closure)
    assert seen == ["before", "closure", "after"]
    torch.testing.assert_close(loss.detach(), sum(v.square().sum() for v in values))
    assert not any(torch.equal(p, v) for p, v in zip(params, values, strict=True))


@all_optimizers
def test_schedulers_set_the_learning_rate(make, device):
    ours, optimizer, theirs, plain = twins(make, device)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for t in range(3):
        set_grads(ours, theirs)
        optimizer.step()
        scheduler.step()
        plain.param_groups[0]["lr"] = 0.1 * 0.5**t
        plain.step()
        assert_same(ours, theirs)
    cyclic = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=5, cycle_momentum=False
    )
    set_grads(ours)
    optimizer.step()
    cyclic.step()


@all_optimizers
def test_learning_rate_as_a_tensor(make, device):
    ours, theirs = make_params(device), make_params(device)
    optimizer, plain = make(ours, lr=torch.tensor(0.25)), make(theirs, lr=0.25)
    for _ in range(2):
        set_grads(ours, theirs)
        optimizer.step()
        plain.step()
    assert_same(ours, theirs)


@all_optimizers
def test_grad_scaler_unscales_and_skips(make, device):
    ours, optimizer, theirs, plain = twins(make, device)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=1000)
    scaler.scale(torch.zeros(1, device=device))  # makes the scale, as a loss would
    for t in range(4):
        set_grads(ours, theirs)
        for p in ours:
            p.grad *= scaler.get_scale()
        if t == 2:
            ours[1].grad[3] = float("inf")
            before = [p.detach().clone() for p in ours], copy.deepcopy(optimizer.state_dict())
        scaler.step(optimizer)
        scaler.update()
        if t == 2:
            assert_same(ours, before[0])
            assert_equal_states(optimizer.state_dict(), before[1])
        else:
            plain.step()
            assert_same(ours, theirs)
    assert scaler.get_scale() == 2.0**9


def assert_equal_states(actual, expected):
    for index, entry in expected["state"].items():
        for key, value in entry.items():
            assert torch.equal(torch.as_tensor(actual["state"][index][key]), torch.as_tensor(value))


@all_optimizers
def test_step_inside_a_compiled_function(make, device):
    """torch.compile calls step() instead of tracing it: one graph break, nothing compiled anew."""
    ours, optimizer, theirs, plain = twins(make, device)
    frames = []

    def backend(graph, _):
        frames.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def train(x):
        loss = sum((p * x).sum() for p in ours)
        optimizer.step()
        return loss + 1

    for _ in range(12):
        set_grads(ours, theirs)
        train(torch.ones((), device=device))
        plain.step()
    assert_same(ours, theirs)
    assert len(frames) <= 3


@all_optimizers
def test_distributed_checkpoint_state_dicts(make, device):
    """torch.distributed.checkpoint names states by the model's parameters; in one process here."""
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)) for _ in range(2)]
    first, second = (model.to(device) for model in models)
    optimizer = make(first.parameters())
    for _ in range(2):
        set_grads(list(first.parameters()))
        optimizer.step()
    second.load_state_dict(first.state_dict())
    resumed = make(second.parameters())
    saved = get_optimizer_state_dict(first, optimizer)
    set_optimizer_state_dict(second, resumed, copy.deepcopy(saved))
    assert_equal_states(resumed.state_dict(), optimizer.state_dict())
    for _ in range(2):
        set_grads(list(first.parameters()), list(second.parameters()))
        optimizer.step()
        resumed.step()
    assert_same(first.parameters(), second.parameters())


@pytest.mark.parametrize("value", [-1.0, float("nan")])
@all_optimizers
def test_a_tensor_as_lr_is_checked_where_that_waits_for_nothing(make, value):
    (param,) = make_params("cpu")[:1]
    with pytest.raises(ValueError, match=f"lr must be >= 0, got {value}"):
        make([param], lr=torch.tensor(value))
    optimizer = make([param])
    group = {"params": make_params("cpu")[1:], "lr": torch.tensor(value)}
    with pytest.raises(ValueError, match=f"lr must be >= 0, got {value}"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_a_tensor_elsewhere_as_lr_is_not_read():
    """A meta tensor stands for one on a GPU: to read it raises, instead of waiting."""
    lr = torch.tensor(0.1, device="meta")
    for cls in (FusedAdam, FusedSGD):
        assert cls(make_params("cpu"), lr=lr).param_groups[0]["lr"] is lr
