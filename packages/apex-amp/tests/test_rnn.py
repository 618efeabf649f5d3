"""apex.RNN: results and gradients, against torch.nn and formulas in float64."""

import pytest
import torch
from torch import nn

from apex.RNN import GRU, LSTM, ReLU, Tanh, mLSTM
from apex.RNN.RNNBackend import bidirectionalRNN

FACTORIES = {"LSTM": LSTM, "GRU": GRU, "ReLU": ReLU, "Tanh": Tanh, "mLSTM": mLSTM}
TORCH = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "ReLU": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
    "Tanh": nn.RNN,
}
STATES = {"LSTM": 2, "mLSTM": 2}


def make(kind, *sizes, seed=0, **kwargs):
    torch.manual_seed(seed)
    return FACTORIES[kind](*sizes, **kwargs).double()


def sequence(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def copy_weights(stack, reference):
    """torch.nn's weights from a stack's cells."""
    with torch.no_grad():
        for layer, cell in enumerate(stack.rnns):
            for ours, theirs in (("w_ih", "weight_ih"), ("w_hh", "weight_hh")):
                getattr(reference, f"{theirs}_l{layer}").copy_(getattr(cell, ours))
            for name in ("b_ih", "b_hh") if cell.bias else ():
                getattr(reference, f"{name.replace('b', 'bias', 1)}_l{layer}").copy_(
                    getattr(cell, name)
                )
            if cell.output_size != cell.hidden_size:
                getattr(reference, f"weight_hr_l{layer}").copy_(cell.w_ho)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", TORCH)
def test_matches_torch(kind, layers, bias):
    model = make(kind, 3, 4, layers, bias=bias)
    reference = TORCH[kind](3, 4, layers, bias=bias).double()
    copy_weights(model, reference)
    x = sequence(5, 2, 3)
    output, hidden = model(x)
    expected, expected_hidden = reference(x)
    torch.testing.assert_close(output, expected)
    assert len(hidden) == STATES.get(kind, 1)
    expected_hidden = expected_hidden if kind == "LSTM" else [expected_hidden]
    for state, expected_state in zip(hidden, expected_hidden, strict=True):
        torch.testing.assert_close(state, expected_state)


def test_projection_matches_torch():
    model = make("LSTM", 3, 4, 2, output_size=2)
    reference = nn.LSTM(3, 4, 2, proj_size=2).double()
    copy_weights(model, reference)
    x = sequence(5, 2, 3)
    output, (h, c) = model(x)
    expected, (expected_h, expected_c) = reference(x)
    for a, b in ((output, expected), (h, expected_h), (c, expected_c)):
        torch.testing.assert_close(a, b)


def mlstm_by_formula(cell, x, h, c):
    """Krause et al., equations 13 to 19, one gate at a time."""
    m = (x @ cell.w_mih.T) * (h @ cell.w_mhh.T)
    biases = (cell.b_ih + cell.b_hh).split(cell.hidden_size) if cell.bias else [0.0] * 4
    weights = zip(cell.w_ih.split(cell.hidden_size), cell.w_hh.split(cell.hidden_size), strict=True)
    i, f, g, o = (x @ a.T + m @ b.T + bias for (a, b), bias in zip(weights, biases, strict=True))
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h @ cell.w_ho.T if cell.output_size != cell.hidden_size else h), c


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("output_size", [None, 2])
def test_mlstm_matches_its_formula(output_size, bias):
    model = make("mLSTM", 3, 4, 2, output_size=output_size, bias=bias)
    x = sequence(5, 2, 3)
    output, hidden = model(x)
    layer_input, finals = list(x), []
    for cell in model.rnns:
        h, c = x.new_zeros(2, output_size or 4), x.new_zeros(2, 4)
        for step, value in enumerate(layer_input):
            h, c = mlstm_by_formula(cell, value, h, c)
            layer_input[step] = h
        finals.append((h, c))
    torch.testing.assert_close(output, torch.stack(layer_input))
    for state, expected in zip(hidden, zip(*finals, strict=True), strict=True):
        torch.testing.assert_close(state, torch.stack(expected))


@pytest.mark.parametrize("kind", FACTORIES)
def test_gradcheck(kind):
    model = make(kind, 2, 3, 2, bidirectional=True, output_size=None if kind == "GRU" else 2)
    names = [name for name, _ in model.named_parameters()]
    x = sequence(3, 2, 2).requires_grad_()

    def function(x, *params):
        model.reset_hidden(2)
        state = dict(zip(names, params, strict=True))
        output, hidden = torch.func.functional_call(model, state, (x,))
        return output, *hidden

    assert torch.autograd.gradcheck(function, (x, *model.parameters()), fast_mode=True)


@pytest.mark.parametrize("kind", FACTORIES)
def test_reverse(kind):
    model = make(kind, 3, 4, 2)
    x = sequence(5, 2, 3)
    output, hidden = model(x, reverse=True)
    model.reset_hidden(2)
    expected, expected_hidden = model(x.flip(0))
    torch.testing.assert_close(output, expected.flip(0))
    for state, expected_state in zip(hidden, expected_hidden, strict=True):
        torch.testing.assert_close(state, expected_state)


@pytest.mark.parametrize("kind", FACTORIES)
def test_bidirectional(kind):
    model = make(kind, 3, 4, 2, bidirectional=True)
    assert isinstance(model, bidirectionalRNN)
    x = sequence(5, 2, 3)
    output, hidden = model(x)
    assert output.shape == (5, 2, 8)
    assert not torch.equal(model.fwd.rnns[0].w_ih, model.bckwrd.rnns[0].w_ih)
    model.reset_hidden(2)
    forth, hidden_forth = model.fwd(x)
    back, hidden_back = model.bckwrd(x, reverse=True)
    assert torch.equal(output, torch.cat([forth, back], -1))
    for state, *both in zip(hidden, hidden_forth, hidden_back, strict=True):
        assert torch.equal(state, torch.cat(both, -1))
    model.reset_hidden(2)
    _, steps = model(x, collect_hidden=True)
    assert len(steps) == 5
    assert torch.equal(steps[-1][0][..., :4], hidden_forth[0])
    assert torch.equal(steps[0][0][..., 4:], hidden_back[0])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", FACTORIES)
def test_collected_states(kind, reverse):
    model = make(kind, 3, 4, 2)
    x = sequence(5, 2, 3)
    output, steps = model(x, collect_hidden=True, reverse=reverse)
    assert len(steps) == 5
    for step, states in enumerate(steps):
        assert [list(s.shape) for s in states] == [[2, 2, 4]] * STATES.get(kind, 1)
        assert torch.equal(states[0][-1], output[step])
    model.reset_hidden(2)
    _, final = model(x, reverse=reverse)
    for state, expected in zip(steps[0 if reverse else -1], final, strict=True):
        assert torch.equal(state, expected)


def test_batch_first_and_dropout():
    model = make("Tanh", 3, 4, 2, batch_first=True)
    twin = make("Tanh", 3, 4, 2)
    x = sequence(5, 2, 3)
    assert torch.equal(model(x.transpose(0, 1))[0], twin(x)[0].transpose(0, 1))
    model = make("ReLU", 3, 4, 2, dropout=1.0)
    for cell in model.rnns:
        nn.init.ones_(cell.b_ih)
    model.rnns[1].w_hh.data.zero_()
    expected = torch.relu(model.rnns[1].b_ih + model.rnns[1].b_hh).expand(5, 2, 4)
    output, (h,) = model(x)
    torch.testing.assert_close(output, expected)  # nothing reaches the second layer
    model.reset_hidden(2)
    model.eval()
    torch.testing.assert_close(h[0], model(x)[1][0][0])  # all of the input reaches the first
    assert not torch.allclose(model(x)[0], expected)
