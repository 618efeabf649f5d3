"""Steps with closures: casts in them, and overflows in them."""

import copy

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp import _amp_state

NO_MASTERS = ("O0", "O1", "O3", "O4")


def build(level, make):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = make(model.parameters())
    options = {"loss_scale": "dynamic", "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **options)
    _amp_state.loss_scalers[0]._loss_scale = 256.0
    return model, optimizer


def closure_of(model, optimizer, factors):
    """A closure whose n-th call computes a loss that is multiplied by the n-th factor."""
    factors = iter(factors)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).float().pow(2).mean()
        with amp.scale_loss(loss * next(factors), optimizer) as scaled_loss:
            scaled_loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("level", NO_MASTERS)
def test_an_overflow_in_a_closure_skips_the_step(level, make_optimizer, capsys):
    model, optimizer = build(level, make_optimizer)
    closure = closure_of(model, optimizer, [1.0, float("inf"), 1.0])
    optimizer.step(closure)
    _amp_state.verbosity = 1
    before = copy.deepcopy((model.state_dict(), list(optimizer.state.values())))
    loss = optimizer.step(closure)
    assert loss.isfinite()
    assert "Skipping step" in capsys.readouterr().out
    assert _amp_state.loss_scalers[0].loss_scale() == 128.0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[0][name])
    for state, old in zip(optimizer.state.values(), before[1], strict=True):
        for name, value in old.items():
            is_same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
            assert is_same(state[name], value)
    optimizer.step(closure)
    assert not torch.equal(model.state_dict()["weight"], before[0]["weight"])
    assert (model.weight @ model.weight).dtype is {
        "O1": torch.float16,
        "O3": torch.float16,
        "O4": torch.bfloat16,
    }.get(level, torch.float32)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_an_overflow_in_a_later_call_of_the_closure(level):
    """L-BFGS has moved the parameters by then."""
    model, optimizer = build(level, lambda params: torch.optim.LBFGS(params, lr=0.125))
    before = copy.deepcopy(model.state_dict())
    optimizer.step(closure_of(model, optimizer, [float("inf")]))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    with pytest.raises(RuntimeError, match=r"overflow in call 3 of the closure of LBFGS\.step"):
        optimizer.step(closure_of(model, optimizer, [1.0, 1.0, float("inf")]))
    assert not optimizer._amp_stash.already_patched
    assert all(param.isfinite().all() for param in model.parameters())


def test_errors_of_a_closure_come_out():
    _, optimizer = build("O1", lambda params: torch.optim.SGD(params, lr=0.125))
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16
