"""Networks compute the same after their channels are permuted, and pruning them keeps more."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from apex.contrib.sparsity import permutation_lib
from apex.contrib.sparsity.permutation_lib import Permutation

SHORT = {"stripe_group_size": 8, "escape_attempts": 2}


@pytest.fixture(autouse=True)
def settings():
    Permutation.set_permutation_saving_params(allow_permutation=True)
    Permutation.set_search_options(SHORT)
    yield
    Permutation.set_search_options(None)
    Permutation.set_permutation_saving_params(allow_permutation=True)


class Function(nn.Module):
    """Parts, and a function of them and of the input."""

    def __init__(self, function, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def conv(inputs, outputs, kernel=3, **options):
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


def chain(*middle, channels=16, reads=16):
    """Two convolutions with something between, an input and an output of their own."""
    return nn.Sequential(conv(3, channels), *middle, conv(reads, 8))


def attention(embed=16, **options):
    def forward(net, x):
        x = net.embed(x)
        y = net.norm(x)
        x = x + net.attend(y, y, y, need_weights=False)[0]
        return net.last(x + net.down(F.gelu(net.up(net.norm2(x)))))

    parts = {"embed": nn.Linear(6, embed), "norm": nn.LayerNorm(embed)}
    parts |= {"attend": nn.MultiheadAttention(embed, 2, batch_first=True, **options)}
    parts |= {
        "norm2": nn.LayerNorm(embed),
        "up": nn.Linear(embed, 32),
        "down": nn.Linear(32, embed),
    }
    return Function(forward, last=nn.Linear(embed, 3), **parts)


def concatenated():
    def forward(net, x):
        a, b = net.a(x), net.b(x)
        c = net.c(F.relu(net.norm(torch.cat([a, b], 1))))
        return net.last(torch.cat((a, c), dim=1))

    parts = {"a": conv(3, 16), "b": conv(3, 24), "norm": nn.BatchNorm2d(40), "c": conv(40, 8)}
    return Function(forward, last=conv(24, 8), **parts)


def residual():
    def forward(net, x):
        x = net.stem(x)
        y = net.b(F.relu(net.norm(net.a(x))))
        x = F.relu(x + y)
        z = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        return net.out(z) + net.out2(x.mean([2, 3]))

    parts = {"stem": conv(3, 16), "a": conv(16, 24), "norm": nn.BatchNorm2d(24), "b": conv(24, 16)}
    return Function(forward, out=nn.Linear(16, 5), out2=nn.Linear(16, 5), **parts)


def mobile():
    """An inverted residual with a squeeze: depthwise, gates, and channels that are scaled."""

    def forward(net, x):
        x = net.norm(net.deep(F.relu6(net.up(net.stem(x)))))
        gate = net.fc2(F.relu(net.fc1(F.adaptive_avg_pool2d(x, 1))))
        return net.last(net.scale * (x * gate.sigmoid()))

    parts = {"stem": conv(3, 8), "up": conv(8, 16, 1), "deep": conv(16, 16, groups=16)}
    parts |= {"norm": nn.BatchNorm2d(16), "fc1": conv(16, 8, 1), "fc2": conv(8, 16, 1)}
    net = Function(forward, last=conv(16, 8), **parts)
    net.scale = nn.Parameter(torch.ones(16, 1, 1))
    return net


def own_layer():
    class Own(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight, self.bias) * 2

    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), Own(16, 16), nn.Tanh(), nn.Linear(16, 3))


def shared_twice():
    layer = nn.Linear(16, 16)
    return nn.Sequential(nn.Linear(6, 16), layer, nn.ReLU(), layer, nn.Linear(16, 3))


# Network, shape of its input, weights that are permuted in C.
PERMUTED = {
    "residual": (residual, (2, 3, 6, 6), 4),
    "concatenated": (concatenated, (2, 3, 6, 6), 2),
    "mobile": (mobile, (2, 3, 6, 6), 4),
    "attention": (attention, (2, 5, 6), 4),
    "attention of other keys": (lambda: attention(kdim=16, vdim=16), (2, 5, 6), 4),
    "grouped": (lambda: chain(conv(16, 16, groups=2), nn.ReLU()), (2, 3, 6, 6), 2),
    "own layer": (own_layer, (4, 6), 2),
    "shared twice": (shared_twice, (4, 6), 2),
    "flattened": (
        lambda: nn.Sequential(conv(3, 16), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(16, 8)),
        (2, 3, 6, 6),
        1,
    ),
    "viewed": (
        lambda: Function(
            lambda n, x: n.b(F.avg_pool2d(n.a(x), 6).view(x.size(0), -1)),
            a=conv(3, 16),
            b=nn.Linear(16, 8),
        ),
        (2, 3, 6, 6),
        1,  # a convolution keeps the batch of x
    ),
    "viewed itself": (
        lambda: Function(
            lambda n, x: (lambda y: n.b(y.view(y.shape[0], -1)))(F.avg_pool2d(n.a(x), 6)),
            a=conv(3, 16),
            b=nn.Linear(16, 8),
        ),
        (2, 3, 6, 6),
        1,
    ),
    "norm and pool": (
        lambda: chain(nn.InstanceNorm2d(16, affine=True), nn.MaxPool2d(2), nn.Dropout(), nn.SiLU()),
        (2, 3, 8, 8),
        1,
    ),
    "1-D": (
        lambda: nn.Sequential(nn.Conv1d(3, 16, 3), nn.BatchNorm1d(16), nn.Conv1d(16, 8, 3)),
        (2, 3, 9),
        1,
    ),
    "3-D": (lambda: nn.Sequential(nn.Conv3d(3, 16, 1), nn.Conv3d(16, 8, 1)), (2, 3, 2, 2, 2), 1),
}


def tied():
    net = nn.Sequential(
        nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)
    )
    net[4].weight = net[0].weight  # whose columns are in the order of the input
    net[2].weight = net[0].weight
    return net


def shuffled(net, x):
    y = net.a(x)
    batch, _, height, width = y.shape
    return net.b(
        y.view(batch, 2, 8, height, width).transpose(1, 2).reshape(batch, 16, height, width)
    )


def norm_of_columns(net, x):
    return net.b(net.norm(net.a(x)))


# What depends on the order of channels, or may.
KEPT = {
    "local response norm, a function": (
        lambda: Function(
            lambda n, x: n.b(F.local_response_norm(n.a(x), 3)), a=conv(3, 16), b=conv(16, 8)
        ),
        (2, 3, 6, 6),
    ),
    "group norm": (lambda: chain(nn.GroupNorm(4, 16)), (2, 3, 6, 6)),
    "GLU": (lambda: chain(nn.GLU(1), reads=8), (2, 3, 6, 6)),
    "shuffled": (lambda: Function(shuffled, a=conv(3, 16), b=conv(16, 8)), (2, 3, 6, 6)),
    "part of the channels": (
        lambda: Function(lambda n, x: n.b(n.a(x)[:, :16]), a=conv(3, 32), b=conv(16, 8)),
        (2, 3, 6, 6),
    ),
    "also an output": (
        lambda: Function(
            lambda n, x: (lambda y: (y, n.b(y)))(n.a(x)), a=conv(3, 16), b=conv(16, 8)
        ),
        (2, 3, 6, 6),
    ),
    "added to the input": (
        lambda: Function(lambda n, x: n.b(x + n.a(x)), a=conv(16, 16), b=conv(16, 8)),
        (2, 16, 6, 6),
    ),
    "flattened places": (
        lambda: nn.Sequential(conv(3, 16), nn.Flatten(), nn.Linear(64, 16)),
        (2, 3, 2, 2),
    ),
    "layer norm of places": (
        lambda: Function(norm_of_columns, a=conv(3, 16), norm=nn.LayerNorm(16), b=conv(16, 8)),
        (2, 3, 16, 16),
    ),
    "linear along places": (
        lambda: Function(norm_of_columns, a=conv(3, 16), norm=nn.Linear(16, 16), b=conv(16, 8)),
        (2, 3, 16, 16),
    ),
    "batch norm of steps": (
        lambda: nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)),
        (4, 16, 6),
    ),
    "parametrized": (
        lambda: nn.Sequential(
            nn.Linear(6, 16),
            nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
            nn.Linear(16, 3),
        ),
        (4, 6),
    ),
    "tied": (tied, (4, 16)),
    "tied to an embedding": (
        lambda: Function(
            lambda n, x: F.linear(n.b(n.a(x)), n.table.weight) + n.table(torch.arange(3)).sum(),
            table=nn.Embedding(5, 16),
            a=nn.Linear(6, 16),
            b=nn.Linear(16, 16),
        ),
        (4, 6),
    ),
    "small groups": (lambda: chain(conv(16, 16, groups=4)), (2, 3, 6, 6)),
    "softmax of what is summed": (
        lambda: Function(
            lambda n, x: n.b(n.a(x).cumsum(-1)), a=nn.Linear(6, 16), b=nn.Linear(16, 3)
        ),
        (4, 6),
    ),
    "mean over channels": (
        lambda: Function(
            lambda n, x: n.b(n.a(x) * n.a(x).cumsum(1).mean(1, keepdim=True)),
            a=conv(3, 16),
            b=conv(16, 8),
        ),
        (2, 3, 6, 6),
    ),
}


def filled(make):
    """A network in float64 whose every number differs, and the weights that would be pruned."""
    torch.manual_seed(0)
    net = make().double().eval()
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if tensor.is_floating_point():
            fill = nn.init.uniform_ if name.endswith("running_var") else nn.init.normal_
            fill(tensor.data)
    sparse = []
    for name, module in net.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and parameter.shape[1] % 8 == 0 and "out_proj" not in name:
                sparse.append((name, own, parameter))
    return net, sparse


def permute(net, sparse, verbosity=0):
    everything = [*net.named_parameters(), *net.named_buffers()]
    Permutation.set_permutation_params_from_asp(net, sparse, everything, verbosity)
    assert Permutation.permute_model(net)
    return Permutation.get_permutation_stats()


def kept_of(sparse):
    """What 2:4 pruning keeps of all weights, by sorting."""
    total = 0.0
    for weight in {id(p): p for _, _, p in sparse}.values():
        rows = weight.detach().movedim(1, -1).reshape(-1, weight.shape[1])
        total += float(rows.abs().reshape(-1, 4).sort(1).values[:, 2:].sum())
    return total


def outputs(net, x):
    with torch.no_grad():
        y = net(x)
    return y if isinstance(y, tuple) else (y,)


@pytest.mark.parametrize("name", PERMUTED)
def test_same_function(name):
    make, shape, columns = PERMUTED[name]
    net, sparse = filled(make)
    x, before, kept = torch.randn(shape, dtype=torch.float64), copy.deepcopy(net), kept_of(sparse)
    expected = outputs(net, x)
    in_c, in_k, missed = permute(net, sparse)
    assert (len(in_c), missed) == (columns, [])
    assert bool(in_k) == (columns > 0)
    for actual, y in zip(outputs(net, x), expected, strict=True):
        torch.testing.assert_close(actual, y, rtol=1e-11, atol=1e-11)
    changed = [
        not torch.equal(p, q) for p, q in zip(net.parameters(), before.parameters(), strict=True)
    ]
    assert any(changed) == (columns > 0)
    assert kept_of(sparse) > kept if columns else kept_of(sparse) == kept


@pytest.mark.parametrize("name", KEPT)
def test_order_is_kept_where_it_matters(name):
    make, shape = KEPT[name]
    net, sparse = filled(make)
    assert sparse
    x = torch.randn(shape, dtype=torch.float64)
    expected = outputs(net, x)
    permute(net, sparse)
    for actual, y in zip(outputs(net, x), expected, strict=True):
        torch.testing.assert_close(actual, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["residual", "concatenated", "grouped", "shared twice"])
def test_same_bits_where_sums_are_exact(name):
    """Integers: no order of a sum rounds."""
    make, shape, columns = PERMUTED[name]
    net, sparse = filled(make)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.running_var, 1 - module.eps)
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.is_floating_point() and not torch.all(tensor == tensor.flatten()[0]):
            tensor.data = tensor.data.mul(50).round()
    x = torch.randint(-4, 5, (*shape[:2], *([4] * len(shape[2:])))).double()  # means of 16
    expected = outputs(net, x)
    assert len(permute(net, sparse)[0]) == columns
    for actual, y in zip(outputs(net, x), expected, strict=True):
        assert torch.equal(actual, y)


def test_training_goes_on_the_same():
    """Gradients and the optimizer's state move with their parameters."""
    net, sparse = filled(residual)
    other = copy.deepcopy(net)
    pairs = [(n, torch.optim.Adam(n.parameters(), lr=1e-2)) for n in (net, other)]
    batches = torch.randn(3, 2, 3, 6, 6, dtype=torch.float64)

    def step(batch):
        for n, optimizer in pairs:
            optimizer.step()  # of the gradients before
            optimizer.zero_grad()
            n(batch).square().mean().backward()

    step(batches[0])
    step(batches[1])
    everything = [*net.named_parameters(), *net.named_buffers()]
    Permutation.set_permutation_params_from_asp(net, sparse, everything, 0, pairs[0][1])
    assert Permutation.permute_model(net)
    step(batches[2])
    torch.testing.assert_close(net(batches[0]), other(batches[0]), rtol=1e-9, atol=1e-9)


def test_the_same_for_the_same_seed():
    states = []
    for seed in (1, 1, 5):
        net, sparse = filled(residual)
        Permutation.set_identical_seed(seed)
        before = torch.get_rng_state()
        permute(net, sparse)
        assert torch.equal(torch.get_rng_state(), before)
        states.append(net.state_dict())
    Permutation.reset_seed()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_what_is_left_out_and_why(capsys):
    permute(*filled(lambda: chain(nn.GroupNorm(4, 16))), verbosity=2)
    text = capsys.readouterr().out
    assert "channels that meet GroupNorm are not permuted" in text
    assert "permuted: 0 weights in C, 0 tensors in K" in text

    net, _ = filled(lambda: chain(channels=12, reads=12))
    permute(net, [("1", "weight", net[1].weight)], verbosity=2)
    assert "keeps" in capsys.readouterr().out
    net, _ = filled(lambda: chain(channels=4, reads=4))
    permute(net, [("1", "weight", net[1].weight)], verbosity=2)
    assert "4 channels are not permuted: Useless C: 4" in capsys.readouterr().out
    net, _ = filled(chain)
    nn.init.ones_(net[1].weight)
    permute(net, [("1", "weight", net[1].weight)], verbosity=2)
    assert "16 channels are not permuted: Not needed" in capsys.readouterr().out


def test_what_cannot_be_traced_is_left_alone(capsys):
    net, sparse = filled(
        lambda: Function(lambda n, x: n.a(x) if x.sum() > 0 else x, a=nn.Linear(16, 16))
    )
    before = copy.deepcopy(net)
    Permutation.set_permutation_params_from_asp(net, sparse, net.named_parameters(), 1)
    assert not Permutation.permute_model(net)
    assert "torch.fx cannot trace Function" in capsys.readouterr().out
    assert torch.equal(net.a.weight, before.a.weight)


def test_forbidden():
    net, sparse = filled(chain)
    before = copy.deepcopy(net.state_dict())
    Permutation.set_permutation_saving_params(allow_permutation=False)
    Permutation.set_permutation_params_from_asp(net, sparse, net.named_parameters())
    assert not Permutation.permute_model(net)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_graph_is_written(tmp_path, capsys):
    Permutation.set_permutation_saving_params(True, True, str(tmp_path))
    net, sparse = filled(residual)
    permute(net, sparse)
    graph = json.loads((tmp_path / "model_permutation_graph.json").read_text())
    assert graph["a"]["target"] == "a"
    assert graph["a"]["sibling_group_id"] == graph["b"]["coparent_group_id"]
    assert graph["a"]["C_permutable"]
    assert graph["out"]["K_frozen_because"] == "reaches the output"
    for options in ({}, {"print_tabular": True}, {"generate_python_code": True}):
        Permutation.trace_and_print_raw_fx_graph(net, **options)
        assert "stem" in capsys.readouterr().out


def test_names():
    assert permutation_lib.convert_fx_node_name("layer1_0_conv") == "layer1.0.conv"
    assert permutation_lib.node_name_matches("layer1_0_conv", "module.layer1.0.Conv")
    assert not permutation_lib.node_name_matches("layer1_0_conv", "layer2.0.conv")
    assert permutation_lib.replicate_sequence([1, 0, 2], 2) == [1, 0, 2, 4, 3, 5]
    Permutation.set_tcpstore_port(2342)


def search_fails(matrix_group, number=0):
    raise ValueError("no such search")


def check_shared(rank, world_size):
    """Both processes get what one alone gets; and all of them hear of a failure."""
    net, sparse = filled(residual)
    Permutation.set_search_options(SHORT)
    assert len(permute(net, sparse)[0]) == 4
    every = [None] * world_size
    torch.distributed.all_gather_object(every, {k: v.tolist() for k, v in net.state_dict().items()})
    assert every[0] == every[1]

    net, sparse = filled(residual)
    before = copy.deepcopy(net.state_dict())
    original = Permutation.find_permutation_for_matrix_group
    if rank == 1:
        Permutation.find_permutation_for_matrix_group = search_fails
    with pytest.raises(RuntimeError, match="failed on rank 1: ValueError: no such search"):
        permute(net, sparse)
    Permutation.find_permutation_for_matrix_group = original
    with pytest.raises(RuntimeError, match="different networks"):
        permute(net, sparse[: len(sparse) - rank - 1])
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_processes_share_the_search(two_ranks):
    two_ranks(check_shared)
