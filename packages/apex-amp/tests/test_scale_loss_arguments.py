"""scale_loss: what it yields, where it does nothing, and which arguments it refuses."""

import pytest
import torch
from torch import nn

from apex import amp


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
        ((loss, [optimizer, stranger]), RuntimeError, r"optimizers\[1\]"),
    ):
        with pytest.raises(error, match=text), amp.scale_loss(*arguments):
            pass
        assert not optimizer._amp_stash.is_prepared
