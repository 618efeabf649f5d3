"""apex.RNN: hidden states from call to call, cells, refusals, and mixed precision."""

import copy
import io

import pytest
import torch
from torch import nn

import apex.RNN
from apex import amp
from apex.RNN import GRU, LSTM, ReLU, Tanh, cells, mLSTM
from apex.RNN.cells import mLSTMRNNCell
from apex.RNN.models import toRNNBackend
from apex.RNN.RNNBackend import RNNCell, bidirectionalRNN, flatten_list, is_iterable, stackedRNN

FACTORIES = {"LSTM": LSTM, "GRU": GRU, "ReLU": ReLU, "Tanh": Tanh, "mLSTM": mLSTM}


def make(kind, *sizes, seed=0, **kwargs):
    torch.manual_seed(seed)
    return FACTORIES[kind](*sizes, **kwargs).double()


def sequence(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_states_stay_from_call_to_call():
    model = make("LSTM", 3, 4, 2)
    x = sequence(6, 2, 3)
    whole, _ = model(x)
    model.reset_hidden(2)
    first, _ = model(x[:2])
    second, _ = model(x[2:])
    torch.testing.assert_close(torch.cat([first, second]), whole)
    model.init_hidden(2)  # the batch has not changed: nothing happens
    assert not torch.equal(model(x)[0], whole)
    model.init_inference(2)
    torch.testing.assert_close(model(x)[0], whole)
    other, _ = model(sequence(6, 3, 3))
    assert other.shape == (6, 3, 4)
    model.init_hidden(2)
    torch.testing.assert_close(model(x)[0], whole)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_detached_states(bidirectional):
    model = make("mLSTM", 3, 4, 1, bidirectional=bidirectional)
    with pytest.raises(RuntimeError, match="no hidden state yet"):
        model.detach_hidden()
    x = sequence(2, 2, 3)
    for _ in range(2):
        output, _ = model(x)
        output.sum().backward()  # a second time fails if the graph reaches back
        before = [c.hidden[0].clone() for c in model.modules() if isinstance(c, RNNCell)]
        model.detach_hidden()
        after = [c.hidden[0] for c in model.modules() if isinstance(c, RNNCell)]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_copies_and_casts_start_without_states():
    model = make("LSTM", 3, 4, 1)
    x = sequence(2, 2, 3)
    expected, _ = model(x)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for clone in (twin, torch.load(file, weights_only=False)):
        assert torch.equal(clone(x)[0], expected)
    model.float()
    torch.testing.assert_close(model(x.float())[0], expected.float())
    assert list(model.state_dict()) == [f"rnns.0.{n}" for n in ("w_ih", "w_hh", "b_ih", "b_hh")]


def test_cells():
    cell = RNNCell(4, 3, 5, cells.LSTMCell, 2, bias=True, output_size=2)
    shapes = {name: list(param.shape) for name, param in cell.named_parameters()}
    assert shapes == {
        "w_ih": [20, 3],
        "w_hh": [20, 2],
        "w_ho": [2, 5],
        "b_ih": [20],
        "b_hh": [20],
    }
    assert RNNCell(1, 3, 5, cells.RNNTanhCell, 1).b_ih is None
    for gain in (1, 3):
        cell.reset_parameters(gain)
        largest = max(param.abs().max() for param in cell.parameters())
        assert 0.8 * gain < largest * 5**0.5 <= gain
    twin = cell.new_like(7)
    assert (twin.input_size, twin.hidden_size, twin.output_size, twin.bias) == (7, 5, 2, True)
    assert cell.new_like().input_size == 3
    cell.init_hidden(6)
    assert [list(state.shape) for state in cell.hidden] == [[6, 2], [6, 5]]
    h, c = cell(torch.randn(6, 3))
    assert cell.hidden[0] is h
    assert cell.hidden[1] is c
    multiplicative = mLSTMRNNCell(3, 5, output_size=2)
    assert list(multiplicative.w_mih.shape) == [2, 3]
    assert list(multiplicative.w_mhh.shape) == [2, 2]
    assert multiplicative.new_like(9).w_mih.shape == (2, 9)
    assert multiplicative.b_ih is None


def test_stacks_of_given_cells():
    given = [RNNCell(1, 3, 4, cells.RNNTanhCell, 1), RNNCell(1, 4, 4, cells.RNNReLUCell, 1)]
    model = stackedRNN(given, num_layers=2)
    assert list(model.rnns) == given
    assert model(torch.randn(5, 2, 3))[0].shape == (5, 2, 4)
    assert bidirectionalRNN(given, 2)(torch.randn(5, 2, 3))[0].shape == (5, 2, 8)
    assert isinstance(toRNNBackend(given, 2), stackedRNN)


def test_refusals():
    cell = RNNCell(1, 3, 4, cells.RNNTanhCell, 1)
    for call, error, text in (
        (lambda: stackedRNN([cell], 2), ValueError, "1 cells for num_layers=2"),
        (lambda: stackedRNN([cell, LSTM(4, 4, 1).rnns[0]], 2), ValueError, "must agree"),
        (lambda: stackedRNN(nn.Linear(1, 1)), RuntimeError, "got Linear"),
        (lambda: stackedRNN(cell, 0), ValueError, "num_layers must be positive"),
        (lambda: stackedRNN(cell, dropout=2.0), ValueError, "dropout"),
        (lambda: GRU(3, 4, 1, output_size=2), ValueError, "GRU: output_size"),
        (lambda: LSTM(3, 0, 1), ValueError, "hidden_size must be positive"),
        (lambda: stackedRNN(cell)(torch.randn(2, 3)), ValueError, r"got \[2, 3\]"),
        (lambda: stackedRNN(cell)(torch.randn(0, 2, 3)), ValueError, "at least one step"),
    ):
        with pytest.raises(error, match=text):
            call()


def test_helpers():
    assert apex.RNN.models.LSTM is LSTM
    assert is_iterable([1])
    assert not is_iterable(1)
    tensors = [torch.ones(2), torch.zeros(2)]
    assert torch.equal(flatten_list(tensors), torch.stack(tensors))
    assert flatten_list(tensors[0]) is tensors[0]
    assert flatten_list(3) == 3


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("kind", FACTORIES)
def test_trains_in_mixed_precision(kind, level, device):
    torch.manual_seed(0)
    projection = {} if kind == "GRU" else {"output_size": 6}
    model = FACTORIES[kind](4, 8, 2, bidirectional=True, **projection).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    dtype = {"O1": torch.float16, "O4": torch.bfloat16}.get(level, torch.float32)
    x = torch.randn(3, 5, 4, device=device)
    losses = []
    for _ in range(8):
        model.reset_hidden(5)
        output, hidden = model(x)
        assert {output.dtype, *(state.dtype for state in hidden)} == {dtype}
        loss = (output.float() - 0.1).square().mean()
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    with amp.disable_casts():
        assert model(x)[0].dtype is torch.float32  # states of another dtype are cast
