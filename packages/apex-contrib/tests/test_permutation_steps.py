"""The steps of channel permutations under Apex's names, and permutations of single nodes."""

import copy
import itertools
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from apex.contrib.sparsity import ASP
from apex.contrib.sparsity.permutation_lib import Permutation

ORDER = [3, 1, 0, 2, 7, 5, 6, 4, *range(8, 16)]


@pytest.fixture(autouse=True)
def settings():
    Permutation.set_permutation_saving_params(allow_permutation=True)
    Permutation.set_search_options({"escape_attempts": 0})
    yield
    Permutation.set_search_options(None)
    Permutation.set_permutation_params_from_asp(nn.Identity(), [], [])


class Net(nn.Module):
    """A residual block, depthwise and grouped convolutions, a held scale, a concatenation."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16)
        self.a, self.b = nn.Conv2d(16, 24, 1), nn.Conv2d(24, 16, 1)
        self.deep = nn.Conv2d(16, 16, 3, groups=16, padding=1)
        self.grouped = nn.Conv2d(16, 16, 1, groups=2)
        self.small = nn.Conv2d(16, 16, 1, groups=4)
        self.scale = nn.Parameter(torch.ones(16, 1, 1))
        self.last = nn.Conv2d(32, 8, 1)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        y = self.deep(x + self.b(torch.tanh(self.a(x))))
        return self.last(torch.cat([self.grouped(self.scale * y), self.small(x)], 1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.attend(x, x, x, need_weights=False)[0])


def prepared(make=Net, verbosity=0):
    """A network in float64, and its graph; all weights with 16 or 24 columns will be pruned."""
    torch.manual_seed(0)
    net = make().double().eval()
    for name, tensor in net.named_parameters():
        nn.init.uniform_(tensor, 0.5, 2) if "norm" in name else nn.init.normal_(tensor)
    sparse = [
        (module_name, name, p)
        for module_name, module in net.named_modules()
        for name, p in module.named_parameters(recurse=False)
        if p.dim() > 1 and p.shape[1] in (16, 24) and "out_proj" not in module_name
    ]
    Permutation.set_permutation_params_from_asp(net, sparse, net.named_parameters(), verbosity)
    graph, is_traced = Permutation.build_fx_graph(net)
    assert is_traced
    return net, graph


def flagged(make=Net):
    net, graph = prepared(make)
    for step in (
        Permutation.init_permutation_flags,
        Permutation.find_real_parents,
        Permutation.find_real_children,
        Permutation.make_sibling_coparent_groups,
        Permutation.fixup_concats,
        Permutation.enforce_dimension_agreement,
        Permutation.propagate_permutation_flags,
    ):
        assert step(graph) is graph
    return net, graph


def outputs(net, shape=(2, 3, 5, 5)):
    torch.manual_seed(1)
    with torch.no_grad():
        return net(torch.randn(shape, dtype=torch.float64))


def test_flags():
    _, graph = flagged()
    real = [name for name, facts in graph.items() if facts["is_real"]]
    assert real == ["stem", "a", "b", "scale", "grouped", "small", "last"]
    columns = {"module_type", "C_param", "K_param", "groups_param", "C_permutable", "K_permutable"}
    found = {n: tuple(f[c] for c in sorted(columns)) for n, f in graph.items() if n in real}
    assert found == {  # C, channels, K, channels, groups, kind
        "stem": (0, False, 16, False, 1, "Conv2d"),  # small() keeps its channels in order
        "a": (16, False, 24, True, 1, "Conv2d"),
        "b": (24, True, 16, False, 1, "Conv2d"),
        "scale": (0, False, 16, False, 1, None),
        "grouped": (8, False, 16, True, 2, "Conv2d"),
        "small": (4, False, 16, True, 4, "Conv2d"),
        "last": (16, True, 8, False, 1, "Conv2d"),
    }
    assert graph["deep"]["K_passthru"]
    assert graph["norm"]["K_passthru"]
    assert graph["last"]["K_frozen_because"] == "reaches the output"
    assert "groups of 4 channels" in graph["stem"]["K_frozen_because"]
    json.dumps(graph)  # facts are plain


def test_relatives():
    _, graph = flagged()
    assert graph["a"]["real_parents"] == ["stem"]
    assert set(graph["stem"]["real_children"]) == {"a", "grouped", "small"}
    assert set(graph["last"]["real_parents"]) == {"grouped", "small"}
    assert Permutation.recursive_find_real_children("stem", graph) == graph["stem"]["real_children"]
    assert Permutation.find_node_real_parents(graph, "last", ["grouped"])[0] == "grouped"
    assert set(graph["grouped"]["real_parents"]) == {"scale", "stem", "b"}
    assert graph["scale"]["real_parents"] == []


def test_groups():
    _, graph = flagged()
    assert graph["b"]["sibling_group_id"] == graph["a"]["coparent_group_id"]
    assert len(graph["last"]["sibling_group_id"]) == 2  # a part for each that is concatenated
    assert graph["last"]["sibling_group_id"] == [
        *graph["grouped"]["coparent_group_id"],
        *graph["small"]["coparent_group_id"],
    ]
    siblings = Permutation.collect_siblings(graph, "a", set())
    assert siblings == {"a", "grouped"}
    assert Permutation.collect_coparents(graph, "b", set()) == {"stem", "b", "scale"}
    assert {"b"} in Permutation.extract_all_unique_siblings(graph)
    Permutation.find_real_siblings(graph)
    assert graph["last"]["real_siblings"] == []


def test_one_that_is_forbidden_forbids_all():
    _, graph = flagged()
    graph["a"]["C_permutable"] = graph["b"]["C_permutable"] = True
    graph["last"]["C_permutable"] = False
    Permutation.propagate_sibling_group(graph, {"a", "b", "last"}, 2)
    assert not any(graph[name]["C_permutable"] for name in ("a", "b", "last"))
    graph["a"]["K_permutable"], graph["b"]["K_permutable"] = True, False
    Permutation.propagate_coparent_group(graph, {"a", "b"}, 0)
    assert not graph["a"]["K_permutable"]


def test_attention_has_its_projection_behind_it():
    _, graph = flagged(Attention)
    assert graph["attend"]["children"] == ["attend_out_proj"]
    assert graph["attend_out_proj"]["parents"] == ["attend"]
    assert (graph["attend"]["C_permutable"], graph["attend"]["K_permutable"]) == (True, False)
    projection = graph["attend_out_proj"]
    assert (projection["C_permutable"], projection["K_permutable"]) == (False, True)
    assert projection["K_param"] == 16
    assert graph["last"]["real_parents"] == ["attend_out_proj"]
    assert graph["last"]["sibling_group_id"] == projection["coparent_group_id"]


def test_searching_and_applying_by_steps():
    net, graph = flagged()
    expected = outputs(net)
    Permutation.find_permutations(graph)
    assert graph.share.found
    Permutation.sync_permutations(graph)
    (group,) = graph["b"]["sibling_group_id"]
    permutation = graph.permutations[group]
    assert sorted(permutation) == list(range(24))
    assert Permutation.fetch_C_permutation_sequence_value("b", graph) == permutation
    assert Permutation.fetch_K_permutation_sequence_value("a", graph) == permutation
    assert Permutation.fetch_C_permutation_sequence_value("stem", graph) == []
    missed = Permutation.check_graph_for_unpermuted_nodes(graph)  # nothing was applied yet
    assert missed == ["a_K", "b_C"]
    before = net.b.weight.detach().clone()
    assert Permutation.apply_permutations(graph) is graph
    assert Permutation.check_graph_for_unpermuted_nodes(graph) == []
    assert torch.equal(net.b.weight, before[:, permutation])
    assert graph["b"]["C_permuted"]
    assert graph["a"]["K_permuted"]
    assert not graph["b"]["K_permuted"]
    torch.testing.assert_close(outputs(net), expected)


def test_offline():
    """ROCm's order: the graph first, then its application, to an equal network too."""
    net, _ = prepared()
    other, expected = copy.deepcopy(net), outputs(net)
    graph, is_traced = Permutation.build_offline_permutation_graph(net)
    assert is_traced
    torch.testing.assert_close(outputs(net), expected, rtol=0, atol=0)
    Permutation.apply_offline_permutation(other, graph)
    Permutation.apply_offline_permutation(net, graph)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(outputs(net), expected)
    with pytest.raises(ValueError, match="got a Attention with other channels"):
        Permutation.apply_offline_permutation(Attention(), graph)


def test_searching_for_rocm():
    _, graph = prepared()
    assert Permutation.init_permutation_flag(graph) is graph
    assert any(Permutation.search_for_good_permutation(graph).permutations.values())


def test_one_group():
    net, graph = flagged()
    expected, (group,) = outputs(net), graph["b"]["sibling_group_id"]
    found = Permutation.find_sibling_group_permutation(graph, group)
    assert sorted(found) == list(range(24))
    assert not Permutation.permute_sibling_group(graph, group, found[:-1])
    assert not Permutation.permute_sibling_group(graph, group, [0] * 24)
    assert Permutation.permute_sibling_group(graph, group, found)
    assert graph["b"]["C_permuted"]
    torch.testing.assert_close(outputs(net), expected)
    (of_stem,) = graph.spaces_made("stem")
    assert Permutation.find_sibling_group_permutation(graph, of_stem) is None
    assert not Permutation.permute_sibling_group(graph, of_stem, range(16))


def test_skipping_a_group(capsys):
    net, graph = flagged()
    before, (group,) = copy.deepcopy(net.state_dict()), graph["b"]["sibling_group_id"]
    Permutation._verbosity = 2
    for other in graph["last"]["sibling_group_id"]:
        Permutation.skip_sibling_group(graph, other, "so")
    assert Permutation.skip_sibling_group(graph, group, "a test") is graph
    assert "24 channels are not permuted: a test" in capsys.readouterr().out
    assert not graph["b"]["C_permutable"]
    assert graph["b"]["C_frozen_because"] == "a test"
    Permutation.apply_permutations(Permutation.search_for_good_permutation(graph))
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_sparse_weights():
    net, graph = flagged()
    (weight,) = Permutation.find_sparse_parameters_for_node("module.b")
    assert weight is net.b.weight
    assert Permutation.find_sparse_parameters_for_node("stem") == []
    assert Permutation.find_sparse_parameters_for_node("nothing") == []
    found = Permutation.collect_sparse_weights(graph, ["b", "a"], 8)
    rows = [net.b.weight.reshape(-1, 8), net.a.weight.reshape(-1, 8)]
    assert torch.equal(found, torch.cat(rows).abs().float())
    assert Permutation.collect_sparse_weights(graph, ["stem"], 8) is None


def test_by_hand():
    """The rows of who makes channels, what is between, and the columns of who reads them."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8)
    ).double()
    net(torch.randn(4, 3, 5, 5, dtype=torch.float64))  # statistics
    net.eval()
    Permutation.set_permutation_params_from_asp(net, [("3", "weight", net[3].weight)], [])
    graph, _ = Permutation.build_fx_graph(net)
    Permutation.init_permutation_flags(graph)
    expected, before = outputs(net), copy.deepcopy(net.state_dict())

    def apply(dryrun):
        return [
            Permutation.apply_permutation_in_K_dim("0", ORDER, graph, dryrun),
            Permutation.apply_permutation_in_K_dim_to_children(graph, "_0", ORDER, dryrun),
            Permutation.apply_permutation_in_C_dim("3", ORDER, dryrun),
        ]

    assert apply(dryrun=True) == [True] * 3
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert apply(dryrun=False) == [True] * 3
    assert torch.equal(net[1].running_mean, before["1.running_mean"][ORDER])
    assert torch.equal(net[4].running_mean, before["4.running_mean"])  # behind a real node
    torch.testing.assert_close(outputs(net), expected)
    assert Permutation.apply_permutation_in_C_dim("3", [1, 0])  # each pair
    assert torch.equal(net[3].weight[:, ::2], before["3.weight"][:, ORDER][:, 1::2])


@pytest.mark.parametrize("order", [[0, 0], [], list(range(5)), [1, 2]], ids=str)
def test_what_does_not_fit_changes_nothing(order):
    net, graph = flagged()
    before = copy.deepcopy(net.state_dict())
    assert not Permutation.apply_permutation_in_C_dim("b", order)
    assert not Permutation.apply_permutation_in_K_dim("norm", order)
    assert not Permutation.apply_permutation_in_K_dim_to_children(graph, "stem", order)
    assert not Permutation.permute_attr("scale", order, graph)
    for name in ("nothing", "relu"):
        assert not Permutation.apply_permutation_in_C_dim(name, ORDER)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    with pytest.raises(KeyError, match="'nothing' is no node of the network"):
        Permutation.apply_permutation_in_K_dim("nothing", ORDER, graph)


def test_held_tensors():
    net, graph = flagged()
    net.scale.data.normal_()
    before = net.scale.detach().clone()
    assert Permutation.permute_attr("scale", ORDER, graph, dryrun=True)
    assert torch.equal(net.scale, before)
    assert Permutation.apply_permutation_in_K_dim("scale", ORDER, graph)
    assert torch.equal(net.scale, before[ORDER])


def test_attention_by_hand():
    net, _ = flagged(Attention)
    expected = outputs(net, (2, 4, 6))
    assert Permutation.apply_permutation_in_K_dim("first", ORDER)
    assert Permutation.apply_permutation_in_C_dim("attend", ORDER)
    torch.testing.assert_close(outputs(net, (2, 4, 6)), expected)
    assert Permutation.apply_permutation_in_K_dim("attend", ORDER)  # of its projection
    assert Permutation.apply_permutation_in_C_dim("last", ORDER)
    torch.testing.assert_close(outputs(net, (2, 4, 6)), expected)


def test_masks_become_dense():
    net = nn.Linear(16, 8)
    ASP.init_model_for_pruning(net, verbosity=0, allow_permutation=True)
    ASP.compute_sparse_masks()
    (name, mask), *_ = ((n, b) for n, b in net.named_buffers() if n.endswith("mma_mask"))
    assert not mask.all()
    Permutation.transfer_to_dense_mask()
    assert dict(net.named_buffers())[name].all()
    ASP.reset()


def test_messages_can_wait(capsys):
    Permutation._verbosity = 2
    Permutation.defer_prints()
    Permutation.build_fx_graph(nn.Sequential(nn.Linear(8, 8), nn.GLU()))
    assert capsys.readouterr().out == ""
    Permutation.resume_prints()
    assert "channels that meet GLU are not permuted" in capsys.readouterr().out
    Permutation.resume_prints()
    assert capsys.readouterr().out == ""


def test_graphs_are_printed_and_written(tmp_path, capsys):
    net, graph = prepared()
    for options in itertools.product([False, True], repeat=2):
        Permutation.print_raw_fx_graph(net, *options)
        assert "stem" in capsys.readouterr().out
    path = tmp_path / "graph.json"
    Permutation.build_fx_graph(net, True, str(path))
    assert json.loads(path.read_text()) == graph
    Permutation.build_offline_permutation_graph(net, True, str(path))
    assert json.loads(path.read_text())["b"]["C_permutable"]
