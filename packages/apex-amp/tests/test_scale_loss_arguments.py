"""scale_loss: what it yields, where it does nothing, and which arguments it refuses."""

import numpy as np
import pytest
import torch
from torch import nn

from apex import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def build(level, **kwargs):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_what_is_yielded(dtype):
    _, optimizer = build("O1")
    loss = torch.ones(2, 3, dtype=dtype, requires_grad=True)
    with amp.scale_loss(loss, [optimizer]) as scaled_loss:
        assert scaled_loss.dtype is torch.float32
        assert torch.equal(scaled_loss.detach(), torch.full((2, 3), 65536.0))


def test_nothing_is_done_at_static_scale_one():
    model, optimizer = build("O0")
    model.weight = nn.Parameter(torch.ones(1))
    with amp.scale_loss(model.weight.sum() * float("inf"), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert model.weight.grad.item() == float("inf")
    assert not optimizer._amp_stash.lazy_init_called


def test_disabled():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, enabled=False)
    loss = torch.ones(())
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss


@pytest.mark.parametrize("loss", [3.0, None, {"a": torch.ones(())}], ids=str)
def test_disabled_with_any_loss(loss):
    model = nn.Linear(4, 4)
    amp.initialize(model, enabled=False)
    with amp.debug(model), amp.scale_loss(loss, None) as scaled_loss:
        assert scaled_loss is loss


@pytest.mark.parametrize("level", LEVELS)
def test_optimizers_of_before_amp_was_disabled(level):
    """They step as they would without amp, also where they step on masters."""
    torch.manual_seed(0)
    model, optimizer = build(level, loss_scale=8.0)
    other = nn.Linear(4, 4)
    others = torch.optim.SGD(other.parameters(), lr=0.05)
    amp.initialize(other, others, enabled=False)
    x = torch.ones(2, 4)
    for optimizers in (optimizer, [optimizer, others]):
        before = [p.detach().clone() for p in amp.master_params(optimizer)]
        for _ in range(2):
            loss = model(x).sum() + other(x).sum()
            with amp.scale_loss(loss, optimizers) as scaled_loss:
                assert torch.equal(scaled_loss, loss)
                scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for old, new in zip(before, amp.master_params(optimizer), strict=True):
            # The derivative of the sum by a weight or bias is 2, in each of two passes.
            tolerance = {"rtol": 0, "atol": 1e-3 if new.dtype is torch.float16 else 1e-6}
            torch.testing.assert_close(new.detach(), old.to(new.dtype) - 0.05 * 4, **tolerance)


@pytest.mark.parametrize("loss_id", [np.int64(1), np.uint8(1), torch.tensor(1), True], ids=repr)
def test_any_integer_is_a_loss_id(loss_id):
    model, optimizer = build("O1", num_losses=2)
    amp._amp_state.loss_scalers[1]._loss_scale = 4.0
    with amp.scale_loss(model.weight.sum(), optimizer, loss_id) as scaled_loss:
        assert torch.equal(scaled_loss, 4.0 * model.weight.sum())
        scaled_loss.backward()
    assert amp._amp_state.loss_scalers[1]._unskipped == 1


def test_refusals():
    loss = torch.ones((), requires_grad=True)
    model = nn.Linear(4, 4)
    stranger = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"amp\.initialize"), amp.scale_loss(loss, stranger):
        pass
    model, optimizer = build("O1", num_losses=2)
    for arguments, error, text in (
        ((1.0, optimizer), TypeError, "loss must be a tensor"),
        ((loss, "sgd"), TypeError, "optimizers"),
        ((loss, [optimizer, None]), TypeError, "NoneType at 1"),
        ((loss, optimizer, 2), ValueError, r"loss_id must be an int in \[0, 2\)"),
        ((loss, optimizer, -1), ValueError, "loss_id"),
        ((loss, optimizer, 1.0), ValueError, "loss_id must be an int"),
        ((loss, [optimizer, stranger]), RuntimeError, r"optimizers\[1\]"),
    ):
        with pytest.raises(error, match=text), amp.scale_loss(*arguments):
            pass
        assert not optimizer._amp_stash.is_prepared
