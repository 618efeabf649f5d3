"""A step that fails between its launches: nothing runs twice, and no state is left half made."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from apex import optimizers

OPERATORS = {
    "FusedAdam": ("fused_adam.optimizer", "adam_step", {}),
    "FusedLAMB": ("fused_lamb.shared_step", "lamb_step", {}),
    "FusedNovoGrad": ("fused_novograd.optimizer", "novograd_step", {}),
    "FusedAdagrad": ("fused_adagrad.optimizer", "adagrad_step", {}),
    "FusedSGD": ("fused_sgd.optimizer", "sgd_step", {"momentum": 0.9}),
    "FusedLARS": ("fused_lars.optimizer", "lars_step", {"momentum": 0.9}),
}


@pytest.fixture(params=OPERATORS)
def kind(request):
    return request.param


def make(kind, dtypes=(torch.float32,), device="cpu"):
    params = [torch.nn.Parameter(torch.ones(3, 4, dtype=d, device=device)) for d in dtypes]
    for param in params:
        param.grad = torch.full_like(param, 0.5)
    return params, getattr(optimizers, kind)(params, lr=0.1, **OPERATORS[kind][2])


def replace_operator(monkeypatch, kind, wrap):
    module, name, _ = OPERATORS[kind]
    module = importlib.import_module(f"apex.optimizers.{module}")
    monkeypatch.setattr(module, name, wrap(getattr(module, name)))


@pytest.mark.parametrize("moved", [False, True], ids=["same_memory", "other_memory"])
def test_an_error_after_the_launch_is_not_answered_by_another(kind, moved, monkeypatch, device):
    """The device may be lost by then; what was written must not be written once more."""
    (expected,), reference = make(kind, device=device)
    (param,), optimizer = make(kind, device=device)
    for _ in range(2):
        reference.step()
        optimizer.step()
    reference.step()

    def failing(operator):
        def run(*args):
            operator(*args)
            raise RuntimeError("the device is lost")

        return run

    replace_operator(monkeypatch, kind, failing)
    if moved:
        param.data = param.data.clone()
    with pytest.raises(RuntimeError, match="the device is lost"):
        optimizer.step()
    assert torch.equal(param, expected)


def test_states_of_launches_that_did_not_run_are_taken_back(kind, monkeypatch, device):
    params, optimizer = make(kind, (torch.float32, torch.float64), device)
    calls = []

    def failing(operator):
        def run(*args):
            calls.append(args)
            if len(calls) == 2:
                raise RuntimeError("out of memory")
            operator(*args)

        return run

    replace_operator(monkeypatch, kind, failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    has_run = [bool(param.detach().ne(1).any()) for param in params]
    assert sorted(has_run) == [False, True]
    assert [param in optimizer.state for param in params] == has_run
    optimizer.step()
    assert all(param.detach().ne(1).any() for param in params)


def test_parameters_that_join_later_share_a_launch_from_their_second_step_on(monkeypatch, device):
    params, optimizer = make("FusedSGD", (torch.float32,) * 3, device)
    calls = []

    def counting(operator):
        return lambda *args: calls.append(len(args[0])) or operator(*args)

    replace_operator(monkeypatch, "FusedSGD", counting)
    params[1].grad = None
    optimizer.step()
    params[1].grad = torch.ones_like(params[1])
    for _ in range(3):
        optimizer.step()
    assert calls == [2, 2, 1, 3, 3]


@pytest.mark.parametrize("kind", ["FusedSGD", "FusedLARS"], indirect=True)
def test_a_buffer_of_none_is_a_missing_one(kind, device):
    """So torch.optim.SGD says that a parameter's first step is to come."""
    (expected,), fresh = make(kind, device=device)
    (param,), optimizer = make(kind, device=device)
    optimizer.step()
    with torch.no_grad():
        param.fill_(1)
    optimizer.state[param]["momentum_buffer"] = None
    fresh.step()
    optimizer.step()
    assert torch.equal(param, expected)
    saved = optimizer.state_dict()
    saved["state"][0]["momentum_buffer"] = None
    optimizer.load_state_dict(saved)
    assert optimizer.state[param].get("momentum_buffer") is None
    optimizer.step()
    fresh.state.clear()
    fresh.step()
    assert torch.equal(param, expected)


def test_copies_of_another_layout_are_refused_by_the_operators_own_words(device):
    """Once and for all: a new division would not help."""
    model = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.float16, device=device))
    master = torch.nn.Parameter(model.detach().float())
    optimizer = optimizers.FusedSGD([master], lr=0.1, momentum=0.9)
    optimizer._amp_stash = SimpleNamespace(fp32_from_fp16_groups=[[master]], fp16_groups=[[model]])
    master.grad = torch.ones_like(master)
    optimizer.step()
    value, buffer = master.detach().clone(), optimizer.state[master]["momentum_buffer"].clone()
    model.data = model.data.t()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="sgd_step: a tensor was not contiguous"):
            optimizer.step()
    assert torch.equal(master, value)
    assert torch.equal(optimizer.state[master]["momentum_buffer"], buffer)
    model.data = model.data.t()
    optimizer.step()
    assert torch.equal(model, master.half())
