"""Layers, views and held tensors through which channels are permuted, and what must stop them.

Each network computes the same in float64 afterwards, in training and in evaluation, and 2:4 pruning
keeps as much as before or more.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from apex.contrib.groupbn import BatchNorm2d_NHWC
from apex.contrib.sparsity import ASP
from apex.contrib.sparsity.permutation_lib import Permutation


@pytest.fixture(autouse=True)
def settings():
    Permutation.set_permutation_saving_params(allow_permutation=True)
    Permutation.set_search_options({"stripe_group_size": 8, "escape_attempts": 2})
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    Permutation.set_search_options(None)
    ASP.reset()


class Net(nn.Module):
    """Parts, and a function of them and of the input."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def conv(inputs, outputs, kernel=3, **options):
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


def between(*middle, reads=16):
    return nn.Sequential(conv(3, 16), *middle, conv(reads, 8))


def held(*shape):
    return nn.Parameter(torch.randn(shape))


def steps(function, **parts):
    """A linear layer of ``[4, 5, 6]``, something, and another linear layer."""
    whole = lambda net, x: net.last(function(net, net.first(x)))
    return Net(whole, first=nn.Linear(6, 16), last=nn.Linear(16, 3), **parts)


def planes(function, reads=16, **parts):
    whole = lambda net, x: net.last(function(net, net.first(x)))
    return Net(whole, first=conv(3, 16), last=conv(reads, 8), **parts)


def one_dimensional_beside_two():
    def forward(net, x):
        x = net.stem(x)
        n, c, h, w = x.shape
        rows = net.flat(x.view(n, c, h * w)).view(x.shape)
        return net.last(F.relu(rows + net.square(x)))

    parts = {"stem": conv(3, 16), "flat": nn.Conv1d(16, 16, 1), "square": conv(16, 16)}
    return Net(forward, last=conv(16, 8), **parts)


def flattened_for_conv1d():
    def forward(net, x):
        x = net.stem(x)
        rows = net.flat(torch.flatten(x, 2))
        return net.last(net.square(x)) + net.last1(rows).reshape(x.size(0), 8, x.size(2), -1)

    parts = {"stem": conv(3, 16), "flat": nn.Conv1d(16, 16, 1), "square": conv(16, 16)}
    return Net(forward, last=conv(16, 8), last1=nn.Conv1d(16, 8, 1), **parts)


def vision_transformer():
    """Patches become steps; a token of its own goes first, and is what is read at the end."""

    def forward(net, x):
        batch = x.shape[0]
        x = net.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([net.token.expand(batch, -1, -1), x], dim=1) + net.positions
        y = net.norm1(x)
        x = x + net.attend(y, y, y, need_weights=False)[0]
        x = x + net.down(F.gelu(net.up(net.norm2(x))))
        return net.last(net.norm3(x)[:, 0])

    parts = {"patch": nn.Conv2d(3, 16, 2, 2), "token": held(1, 1, 16), "positions": held(1, 10, 16)}
    parts |= {f"norm{i}": nn.LayerNorm(16) for i in (1, 2, 3)}
    parts |= {"attend": nn.MultiheadAttention(16, 2, batch_first=True)}
    return Net(
        forward, up=nn.Linear(16, 32), down=nn.Linear(32, 16), last=nn.Linear(16, 3), **parts
    )


def scaled():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma, self.shift = held(16), held(1, 16, 1, 1)
            self.matrix = held(16, 16)

        def forward(self, x):
            x = self.gamma.view(1, -1, 1, 1) * x + self.shift
            x = x * self.gamma[None, :, None, None]
            return x.permute(0, 2, 3, 1) @ self.matrix

    return Net(lambda n, x: n.b(n.s(n.a(x))), a=conv(3, 16), s=Scale(), b=nn.Linear(16, 3))


def tied_transposed():
    table = held(16, 24)
    forward = lambda n, x: n.c(F.linear(F.relu(F.linear(n.a(x), n.w.t())), n.w))
    return Net(forward, a=nn.Linear(6, 16), w=table, c=nn.Linear(16, 3))


def other_mode():
    def forward(net, x):
        y = net.a(x)
        return net.b(y) + net.aux(y) if net.training else net.b(y)

    return Net(forward, a=conv(3, 16), b=conv(16, 8), aux=conv(16, 8))


SQUARE = (2, 3, 6, 6)
STEPS = (4, 5, 6)
# Network, shape of its input, names permuted in C.
PERMUTED = {
    "conv1d beside conv2d": (
        one_dimensional_beside_two,
        SQUARE,
        ["flat.weight", "square.weight", "last.weight"],
    ),
    "flattened for conv1d": (
        flattened_for_conv1d,
        SQUARE,
        ["flat.weight", "square.weight", "last.weight", "last1.weight"],
    ),
    "layer norm of all": (lambda: between(nn.LayerNorm([16, 6, 6])), SQUARE, ["2.weight"]),
    "layer norm of a plane": (lambda: between(nn.LayerNorm([6, 6])), SQUARE, ["2.weight"]),
    "layer norm of a row": (lambda: between(nn.LayerNorm(6)), SQUARE, ["2.weight"]),
    "layer norm without weights": (
        lambda: between(nn.LayerNorm([16, 6, 6], elementwise_affine=False)),
        SQUARE,
        ["2.weight"],
    ),
    "local response norm": (lambda: between(nn.LocalResponseNorm(5, 0.5)), SQUARE, ["2.weight"]),
    "two local response norms": (
        lambda: between(
            nn.LocalResponseNorm(3, 0.5), nn.ReLU(), conv(16, 16), nn.LocalResponseNorm(2, 0.5)
        ),
        SQUARE,
        ["3.weight", "5.weight"],
    ),
    "PReLU": (lambda: between(nn.PReLU(16), nn.PReLU()), SQUARE, ["3.weight"]),
    "vision transformer": (
        vision_transformer,
        SQUARE,
        ["attend.in_proj_weight", "up.weight", "down.weight", "last.weight"],
    ),
    "attributes": (scaled, SQUARE, ["s.matrix", "b.weight"]),
    "transposed weight": (tied_transposed, (4, 6), ["w", "c.weight"]),
    "weight and its transpose": (
        lambda: steps(lambda n, x: F.linear(x, n.w) + F.linear(x, n.w.t()), w=held(16, 16)),
        STEPS,
        ["w", "last.weight"],
    ),
    "kept dimensions": (
        lambda: planes(lambda n, x: x * x.mean([2, 3], keepdims=True)),
        SQUARE,
        ["last.weight"],
    ),
    "concatenated by axis": (
        lambda: planes(lambda n, x: torch.cat([x, n.b(x)], axis=1), reads=32, b=conv(16, 16)),
        SQUARE,
        ["b.weight", "last.weight"],
    ),
    "another mode": (other_mode, SQUARE, ["b.weight", "aux.weight"]),
}


def with_hook():
    net = between(conv(16, 16))
    net[1].register_forward_hook(lambda module, inputs, output: output.cumsum(1))
    return net


def with_attribute():
    net = steps(lambda n, x: x * n.table)
    net.table = torch.randn(16)
    return net


def with_temporary_buffer():
    net = steps(lambda n, x: x * n.table)
    net.register_buffer("table", torch.randn(16), persistent=False)
    return net


def overlapping_weights():
    """The weight of one layer is a part of another's."""
    whole = torch.randn(24, 16)
    forward = lambda n, x: (lambda y: n.c(n.b(y)) + n.c(F.pad(n.a(y), (0, 16))))(n.first(x))
    parts = {"first": nn.Linear(6, 16), "a": nn.Linear(16, 8), "b": nn.Linear(16, 24)}
    net = Net(forward, c=nn.Linear(24, 3), **parts)
    net.a.weight, net.b.weight = nn.Parameter(whole[8:16]), nn.Parameter(whole)
    return net


def tied_view():
    net = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3))
    net[2].weight = nn.Parameter(net[1].weight.detach().t())
    return net


# What must not be permuted; most of it was once.
KEPT = {
    "attribute of a tensor": (lambda: steps(lambda n, x: x + x.mT.cumsum(1).mT), STEPS),
    "real part": (lambda: steps(lambda n, x: x.real.cumsum(-1) + x), STEPS),
    "constant": (lambda: steps(lambda n, x: x * torch.linspace(1, 2, 16)), STEPS),
    "made from a shape": (
        lambda: planes(lambda n, x: x * torch.arange(x.shape[1]).view(1, -1, 1, 1)),
        SQUARE,
    ),
    "hook": (with_hook, SQUARE),
    "attribute that is not saved": (with_attribute, STEPS),
    "buffer that is not saved": (with_temporary_buffer, STEPS),
    "overlapping weights": (overlapping_weights, STEPS),
    "batch norm of channels that are last": (
        lambda: planes(lambda n, x: n.norm(x), norm=BatchNorm2d_NHWC(16)),
        (2, 3, 16, 16),
    ),
    "split channels": (
        lambda: planes(lambda n, x: x.view(x.size(0), 4, 4, 6, 6).flip(1).view(x.shape)),
        SQUARE,
    ),
    "view of a flatten": (
        lambda: Net(
            lambda n, x: n.b(n.a(x).flatten(1).view(x.size(0), -1, 16)),
            a=conv(3, 16),
            b=nn.Linear(16, 8),
        ),
        (2, 3, 4, 4),
    ),
    "view across dimensions": (
        lambda: Net(
            lambda n, x: n.b(n.a(x).view(x.shape[0], -1, 16)), a=conv(3, 16), b=nn.Linear(16, 8)
        ),
        (2, 3, 4, 4),
    ),
    "gate of all channels": (lambda: steps(lambda n, x: x * x.cumsum(-1).amax(-1, True)), STEPS),
    "slice of channels": (
        lambda: steps(lambda n, x: torch.cat([x[..., 8:], x[..., :8]], -1)),
        STEPS,
    ),
    "local response norm of steps": (
        lambda: steps(lambda n, x: n.norm(x), norm=nn.LocalResponseNorm(3)),
        STEPS,
    ),
    "transposed convolution": (lambda: between(nn.ConvTranspose2d(16, 16, 3)), SQUARE),
    "depthwise of more channels": (lambda: between(conv(16, 32, groups=16), reads=32), SQUARE),
    "tied to a transposed view": (tied_view, (4, 6)),
}


def prepared(make):
    torch.manual_seed(0)
    net = make()
    for module in net.modules():
        for name in ("running_mean", "running_var"):
            if isinstance(getattr(module, name, None), torch.Tensor):
                nn.init.uniform_(getattr(module, name), 0.5, 2)
    sparse = [
        (name, own, parameter)
        for name, module in net.named_modules()
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 1 and parameter.shape[1] % 8 == 0 and "out_proj" not in name
    ]
    return net, sparse


def outputs(net, x):
    """In training, and in evaluation."""
    with torch.no_grad():
        return [copy.deepcopy(net).train(mode)(x) for mode in (True, False)]


def kept_of(sparse):
    rows = [p.detach().movedim(1, -1).reshape(-1, 4) for _, _, p in sparse if p.dim() > 1]
    return sum(float(row.abs().sort(1).values[:, 2:].sum()) for row in rows)


def permuted(make, shape):
    """Permute a network; what it permuted, the network, an input, and the output for that."""
    net, sparse = prepared(make)
    x, kept, present = torch.randn(shape), kept_of(sparse), set(vars(net))
    expected = outputs(net, x)
    Permutation.set_permutation_params_from_asp(net, sparse, net.named_parameters())
    assert Permutation.permute_model(net)
    assert set(vars(net)) == present
    for actual, y in zip(outputs(net, x), expected, strict=True):
        torch.testing.assert_close(actual, y, rtol=1e-11, atol=1e-11)
    assert kept_of(sparse) >= kept * (1 - 1e-12)
    return Permutation.get_permutation_stats(), net, x, expected


@pytest.mark.parametrize("name", PERMUTED)
def test_computes_the_same(name):
    make, shape, columns = PERMUTED[name]
    (in_c, in_k, missed), net, _, _ = permuted(make, shape)
    assert sorted(in_c) == sorted(columns)
    assert missed == []
    assert in_k
    known = {name for name, _ in (*net.named_parameters(), *net.named_buffers())}
    assert known >= {*in_c, *in_k}


@pytest.mark.parametrize("name", KEPT)
def test_what_depends_on_the_order_keeps_it(name):
    make, shape = KEPT[name]
    assert permuted(make, shape)[0] == ([], [], [])


def test_names_of_what_is_permuted():
    """Lists, whose length scripts take; the vectors of norms are among them."""
    make = lambda: between(nn.BatchNorm2d(16), nn.ReLU())
    stats, _, _, _ = permuted(make, SQUARE)
    own = [f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var")]
    assert stats == (["3.weight"], ["0.weight", "0.bias", *own], [])
    assert all(isinstance(part, list) for part in stats)
    stats[0].clear()
    assert Permutation.get_permutation_stats()[0] == ["3.weight"]
    Permutation.set_permutation_saving_params(allow_permutation=False)
    assert not Permutation.permute_model(nn.Sequential())
    assert Permutation.get_permutation_stats() == ([], [], [])


def test_local_response_norm_by_its_own_formula():
    """The oracle is a loop over channels in their first order."""
    torch.manual_seed(0)
    net = between(nn.LocalResponseNorm(3, 0.5, 0.75, 2.0))
    (in_c, in_k, _), net, x, _ = permuted(lambda: net, SQUARE)
    assert (in_c, in_k) == (["2.weight"], ["0.weight", "0.bias"])
    order = net[1].channel_order
    assert not torch.equal(order, torch.arange(16))
    y = net[0](x)
    first = torch.empty_like(y)
    first[:, order] = y
    for place, channel in enumerate(order.tolist()):
        near = first[:, max(channel - 1, 0) : channel + 2].square().sum(1)
        expected = first[:, channel] / (2 + 0.5 / 3 * near) ** 0.75
        torch.testing.assert_close(net[1](y)[:, place], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("again", [False, True])
def test_checkpoint_of_a_permuted_local_response_norm(again):
    make = lambda: between(nn.LocalResponseNorm(3, 0.5))
    _, net, x, expected = permuted(make, SQUARE)
    if again:  # the orders are combined
        Permutation.set_permutation_params_from_asp(net, prepared(lambda: net)[1], [])
        nn.init.normal_(net[2].weight)
        expected = outputs(net, x)
        assert Permutation.permute_model(net)
        assert Permutation.get_permutation_stats()[0] == ["2.weight"]
    with pytest.raises(RuntimeError, match="Unexpected key"):  # the norm would take other channels
        make().load_state_dict(net.state_dict())
    other = make()
    ASP.init_model_for_pruning(other, verbosity=0)
    other.load_state_dict(net.state_dict(), strict=False)
    for actual, y in zip(outputs(other, x), expected, strict=True):
        torch.testing.assert_close(actual, y, rtol=1e-11, atol=1e-11)
    with pytest.raises(RuntimeError, match="Missing key"):
        net.load_state_dict(make().state_dict())
    plain = make()
    ASP.reset()
    ASP.init_model_for_pruning(plain, verbosity=0, allowed_layer_names=[])
    assert not [key for key in plain.state_dict() if "order" in key]
    plain.load_state_dict(make().state_dict())


def test_modes_and_hooks_are_left_as_they_were():
    net, sparse = prepared(other_mode)
    net.aux.eval()
    modes = [module.training for module in net.modules()]
    Permutation.set_permutation_params_from_asp(net, sparse, [])
    assert Permutation.permute_model(net)
    assert [module.training for module in net.modules()] == modes


def test_what_cannot_be_traced_in_another_mode_is_left_alone(capsys):
    def forward(net, x):
        if net.training and x.sum() > 0:
            return net.b(net.a(x)) * 2
        return net.b(net.a(x))

    net, sparse = prepared(lambda: Net(forward, a=conv(3, 16), b=conv(16, 8)).eval())
    before = copy.deepcopy(net.state_dict())
    Permutation.set_permutation_params_from_asp(net, sparse, [], 1)
    assert not Permutation.permute_model(net)
    assert "torch.fx cannot trace Net" in capsys.readouterr().out
    assert not net.training
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_layers_without_weights_yet():
    net = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16), nn.LazyLinear(16))
    Permutation.set_permutation_params_from_asp(net, [("1", "weight", net[1].weight)], [])
    assert Permutation.permute_model(net)
    assert Permutation.get_permutation_stats()[0] == ["1.weight"]
    with pytest.raises(ValueError, match=r"2\.weight of a LazyLinear has no shape.*Run the model"):
        ASP.init_model_for_pruning(net, verbosity=0)
    assert not ASP.already_init_asp_model()
    assert not [name for name, _ in net.named_buffers()]
    net(torch.randn(2, 6))
    ASP.init_model_for_pruning(net, verbosity=0)
    ASP.compute_sparse_masks()
    assert ASP.is_sparsity_enabled()
