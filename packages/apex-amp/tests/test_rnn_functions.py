"""Wrappers of torch's recurrent functions, and casts of weights into one flat tensor."""

import types

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp import rnn_compat, utils, wrap

half, bfloat16, single = torch.float16, torch.bfloat16, torch.float32
LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn_tanh": nn.RNNCell}


def in_float32():
    """A handle whose only casts are those of wrappers."""
    return amp.init(device_types=[])


def is_shim():
    return isinstance(nn.modules.rnn._VF, rnn_compat.VariableFunctionsShim)


def run(layer, x, packed):
    if packed:
        output, _ = layer(nn.utils.rnn.pack_padded_sequence(x, [5, 3]))
        output = output.data
    else:
        output, _ = layer(x)
    return output, *torch.autograd.grad(output.float().sum(), [x, *layer.parameters()])


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, packed, flat):
    torch.manual_seed(0)
    layer = LAYERS[name](4, 3, num_layers=2, bidirectional=True)
    if flat:  # as flatten_parameters does on a GPU, with a gap for padding
        memory, start = torch.empty(2000), 8
        for param in layer.parameters():
            memory[start : start + param.numel()] = param.detach().view(-1)
            param.data = memory[start : start + param.numel()].view(param.shape)
            start += param.numel() + 4
    x = torch.randn(5, 2, 4, requires_grad=True)
    reference = run(layer, x, packed)
    handle = in_float32()
    wrap.new_rnn_cast(name, utils.maybe_bfloat16, handle)
    actual = run(layer, x, packed)
    assert actual[0].dtype is bfloat16
    for value, expected in zip(actual, reference, strict=True):
        # Sums over 5 steps and 2 layers of values that are rounded to 8 bits.
        error = (value - expected).abs().max()
        assert error <= 2**-4 * max(1.0, expected.abs().max())
    assert {grad.dtype for grad in actual[1:]} == {single}
    with amp.disable_casts():
        assert run(layer, x, packed)[0].dtype is single
    handle._deactivate()
    assert not is_shim()
    assert nn.modules.rnn._rnn_impls["RNN_TANH"] is torch._VF.rnn_tanh
    assert run(layer, x, packed)[0].dtype is single


@pytest.mark.parametrize("name", CELLS)
def test_cells(name, capsys):
    handle = in_float32()
    rnn_compat.whitelist_rnn_cells(utils.maybe_bfloat16, handle, verbose=True)
    cell = CELLS[name](2, 2)
    for _ in range(2):
        state = cell(torch.ones(1, 2))
        assert (state[0] if name == "lstm" else state).dtype is bfloat16
    assert f"float32->bfloat16 ({name}_cell)" in capsys.readouterr().out
    assert len(handle.cache) == (4 if handle.has_cache else 0)  # its parameters, cast once
    handle._deactivate()
    assert not is_shim()
    state = cell(torch.ones(1, 2))
    assert (state[0] if name == "lstm" else state).dtype is single


def test_functions_of_another_object():
    seen = []
    backend = types.SimpleNamespace(RNN=lambda x, hx, weights: seen.append((x, hx, weights)))
    function, handle = backend.RNN, in_float32()
    wrap.rnn_cast(backend, "RNN", handle)
    wrap.rnn_cast(backend, "no_such_function", handle)
    backend.RNN(torch.ones(1), torch.ones(1), [torch.ones(2), torch.ones(3)])
    ((x, hx, weights),) = seen
    assert [t.dtype for t in (x, hx, *weights)] == [half] * 4
    assert weights[0].data_ptr() + 2 * 2 == weights[1].data_ptr()
    handle._deactivate()
    assert backend.RNN is function


def test_flat_weights(capsys):
    memory = torch.arange(10.0)
    a = memory[2:4].requires_grad_()
    b = memory[5:9].detach().view(2, 2).requires_grad_()
    flat = torch.zeros(8, dtype=half)
    pieces = utils.new_synthesize_flattened_rnn_weights([a, b], flat, "gru", verbose=True)
    assert capsys.readouterr().out == "float32->float16 (gru)\n" * 2
    assert flat.tolist() == [2, 3, 0, 5, 6, 7, 8, 0]  # with the gap between them
    assert [p.data_ptr() - flat.data_ptr() for p in pieces] == [0, 3 * 2]
    assert [p.shape for p in pieces] == [a.shape, b.shape]
    (2 * pieces[0].sum() + 3 * pieces[1].sum()).backward()
    assert a.grad.tolist() == [2, 2]
    assert b.grad.tolist() == [[3, 3], [3, 3]]

    apart = [[torch.ones(2), torch.ones(1)], [torch.ones(3)]]
    flat = torch.zeros(6, dtype=bfloat16)
    layers = utils.synthesize_flattened_rnn_weights(apart, flat)
    assert [[p.numel() for p in layer] for layer in layers] == [[2, 1], [3]]
    assert flat.tolist() == [1] * 6
    with pytest.raises(ValueError, match="has 5 elements, but the weights take 6"):
        utils.synthesize_flattened_rnn_weights(apart, flat[:5])
    with pytest.raises(TypeError, match=r"is torch\.bfloat16, expected torch\.float16"):
        utils.new_synthesize_flattened_rnn_weights(apart[0], flat)
