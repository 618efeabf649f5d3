"""Sparse gradients of embeddings: they stay sparse, with masters and without."""

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp import _amp_state

half, single = torch.float16, torch.float32


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("loss_scale", [1.0, 8.0, "dynamic"])
def test_without_masters(loss_scale, passes):
    def grads(scale, **kwargs):
        torch.manual_seed(0)
        model = nn.Embedding(10, 4, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale=scale)
        for _ in range(passes):
            loss = (model(torch.tensor([1, 1, 3])) * torch.arange(12.0).view(3, 4)).sum()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        return model.weight.grad

    actual = grads(loss_scale)
    assert actual.is_sparse
    expected = torch.zeros(10, 4)
    expected[1], expected[3] = torch.arange(4.0) * 2 + 4, torch.arange(4.0) + 8
    assert torch.equal(actual.to_dense(), passes * expected)


OPTIMIZERS = {
    "SparseAdam": torch.optim.SparseAdam,
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
}
MASTERS = pytest.mark.parametrize("level", ["O2", "O5"])


def build(level, make=torch.optim.SGD, loss_scale=8.0, lr=0.5, **kwargs):
    torch.manual_seed(0)
    model = nn.Embedding(10, 4, sparse=True, **kwargs)
    nn.init.constant_(model.weight, 1.0)
    optimizer = make(model.parameters(), lr=lr)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=loss_scale)
    if loss_scale == "dynamic":
        _amp_state.loss_scalers[0]._loss_scale = 64.0
    return model, optimizer


def backward(model, optimizer, rows, factor=1.0, weight=None):
    loss = (model(torch.tensor(rows)).float() * torch.arange(4.0) * factor).sum()
    if weight is not None:
        loss = loss + (weight.float() * 2).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def expected_of(rows, factor=1.0):
    grad = torch.zeros(10, 4)
    for row in rows:
        grad[row] += torch.arange(4.0) * factor
    return grad


@pytest.mark.parametrize("loss_scale", [1.0, 8.0, "dynamic"])
@MASTERS
def test_masters_get_sparse_gradients(level, loss_scale):
    model, optimizer = build(level, loss_scale=loss_scale)
    backward(model, optimizer, [1, 1, 3])
    (master,) = amp.master_params(optimizer)
    assert master.dtype is single
    assert (master.grad.is_sparse, master.grad.dtype) == (True, single)
    assert torch.equal(master.grad.to_dense(), expected_of([1, 1, 3]))
    backward(model, optimizer, [3, 5])
    assert master.grad.is_sparse
    assert torch.equal(master.grad.to_dense(), expected_of([1, 1, 3, 3, 5]))


@pytest.mark.parametrize("order", [(None, "dense"), ("dense", None), ("dense", "dense")])
@MASTERS
def test_dense_and_sparse_gradients_add_up(level, order):
    """A tied weight: one pass looks rows up, another one uses the whole matrix."""
    model, optimizer = build(level)
    for kind in order:
        backward(model, optimizer, [1, 3], weight=None if kind is None else model.weight)
    (master,) = amp.master_params(optimizer)
    dense = 2.0 * order.count("dense")
    assert torch.equal(master.grad.to_dense(), expected_of([1, 3] * 2) + dense)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@MASTERS
def test_optimizers_step_as_without_amp(level, kind):
    """Masters move as float32 weights do."""
    make = OPTIMIZERS[kind]
    model, optimizer = build(level, make)
    plain = nn.Embedding(10, 4, sparse=True)
    nn.init.constant_(plain.weight, 1.0)
    reference = make(plain.parameters(), lr=0.5)
    for rows in ([1, 1, 3], [3, 5]):
        backward(model, optimizer, rows)
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
        (plain(torch.tensor(rows)) * torch.arange(4.0)).sum().backward()
        reference.step()
    (master,) = amp.master_params(optimizer)
    torch.testing.assert_close(master, plain.weight)
    assert torch.equal(model.weight, master.to(model.weight.dtype))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_an_overflow_skips_the_step(value):
    model, optimizer = build("O2", loss_scale="dynamic")
    before = model.weight.clone()
    backward(model, optimizer, [1, 3], factor=value)
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 32.0
    (master,) = amp.master_params(optimizer)
    assert master.grad is None


def test_duplicates_are_added_in_float32():
    """3,000 entries of up to 1536 have no sum in float16; in float32 it is exact."""
    model, optimizer = build("O2", loss_scale=2048.0)
    backward(model, optimizer, [1] * 3000, factor=1 / 4)
    (master,) = amp.master_params(optimizer)
    assert torch.equal(master.grad.to_dense(), expected_of([1] * 3000, 1 / 4))
