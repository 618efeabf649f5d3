"""The casts of O1 and O4: which functions cast to what; the same on every device."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp

half, bfloat16, single = torch.float16, torch.bfloat16, torch.float32
LOWER = {
    "linear": lambda x: F.linear(x, torch.ones(4, 4, device=x.device)),
    "matmul": lambda x: x @ torch.ones(4, 4, device=x.device),
    "conv2d": lambda x: F.conv2d(x[None, None], torch.ones(1, 1, 3, 3, device=x.device)),
    "mv": lambda x: torch.mv(x, torch.ones(4, device=x.device)),
    "bmm": lambda x: torch.bmm(x[None], torch.ones(1, 4, 4, device=x.device)),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x[None]),
    "addmm": lambda x: torch.addmm(x, x, x),
}
SINGLE = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "cross_entropy": lambda x: F.cross_entropy(
        x, torch.zeros(4, dtype=torch.long, device=x.device)
    ),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "softplus": F.softplus,
    "pow": lambda x: x.pow(2),
    "operator **": lambda x: x**2,
    "operator ** of a tensor": lambda x: 2.0**x,
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(0),
    "prod": lambda x: x.prod(),
    "exp": torch.exp,
    "log": lambda x: x.abs().log(),
    "norm": lambda x: x.norm(),
    "cumsum": lambda x: x.cumsum(0),
    "rsqrt": lambda x: x.abs().rsqrt(),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"),
}
UNCHANGED = {
    "relu": F.relu,
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "sigmoid": torch.sigmoid,
    "mul": lambda x: x * 2,
    "max_pool": lambda x: F.max_pool2d(x[None], 2),
}
KINDS = {"lower": LOWER, "single": SINGLE, "unchanged": UNCHANGED}
CASES = [(kind, name) for kind, functions in KINDS.items() for name in functions]


def backward_dtype(function, x):
    x = x.detach().requires_grad_()
    function(x).float().sum().backward()
    return x.grad.dtype


@pytest.mark.parametrize("source", [half, bfloat16, single], ids=str)
@pytest.mark.parametrize("patch_type", [half, bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_which_functions_cast(kind, name, patch_type, source, device):
    function, x = KINDS[kind][name], torch.randn(4, 4, device=device).to(source)
    amp.init(patch_type=patch_type)
    expected = {"lower": patch_type, "single": single, "unchanged": source}[kind]
    assert function(x).dtype is expected
    assert backward_dtype(function, x) is source
    with amp.disable_casts():
        assert not torch.is_autocast_enabled(device.type)


def test_widest_dtype_wins(device):
    amp.init()
    x, y = torch.ones(4, device=device), torch.ones(4, device=device, dtype=half)
    assert torch.cat([x, y]).dtype is single
    assert torch.stack([y, x]).dtype is single
    assert (x + y).dtype is single
    assert torch.dot(x, y).dtype is single
    assert torch.addcmul(y, y, x).dtype is single
    assert nn.Bilinear(4, 4, 2).to(device)(y, y).dtype is single
    assert y.add_(x).dtype is half


@pytest.mark.parametrize("module", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("source", [half, single], ids=str)
def test_recurrent_modules(module, source, device):
    rnn = module(4, 4).to(device)
    amp.init()
    x = torch.randn(3, 2, 4, device=device).to(source).requires_grad_()
    output = rnn(x)[0]
    assert output.dtype is half
    output.float().sum().backward()
    assert x.grad.dtype is source
    assert rnn.weight_ih_l0.grad.dtype is single


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_recurrent_cells(cell, device):
    cell = cell(4, 4).to(device)
    amp.init()
    x = torch.randn(2, 4, device=device, requires_grad=True)
    output = cell(x)
    output = output[0] if isinstance(output, tuple) else output
    assert output.dtype is half
    output.float().sum().backward()
    assert x.grad.dtype is single


def test_packed_sequences(device):
    lstm = nn.LSTM(4, 4, num_layers=2, bidirectional=True).to(device)
    amp.init()
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 4, device=device) for n in (3, 2)])
    output, (hidden, cell) = lstm(packed)
    assert {output.data.dtype, hidden.dtype, cell.dtype} == {half}
    output.data.float().sum().backward()
    assert lstm.weight_hh_l1_reverse.grad.dtype is single


@pytest.mark.parametrize("dtype", [half, bfloat16], ids=str)
def test_binary_cross_entropy_is_banned(dtype, device):
    p, y = torch.rand(4, device=device), torch.rand(4, device=device)
    handle = amp.init(patch_type=dtype)
    with pytest.raises(NotImplementedError, match="BCEWithLogitsLoss"):
        F.binary_cross_entropy(p.to(dtype), y)
    with pytest.raises(NotImplementedError, match="register_float_function"):
        nn.BCELoss()(p.to(dtype), y)
    assert F.binary_cross_entropy(p, y).dtype is single
    with amp.disable_casts():
        assert F.binary_cross_entropy(p.to(dtype), y.to(dtype)).dtype is dtype
    handle._deactivate()
    assert F.binary_cross_entropy(p.to(dtype), y.to(dtype)).dtype is dtype
    amp.init(patch_type=dtype, allow_banned=True)
    expected = F.binary_cross_entropy(p.to(dtype).float(), y)
    assert torch.equal(F.binary_cross_entropy(p.to(dtype), y), expected)
