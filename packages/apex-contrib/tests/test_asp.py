"""ASP prunes the right weights, keeps them pruned through training, and survives checkpoints."""

import copy
import io

import pytest
import torch
from torch import nn

from apex.contrib.sparsity import ASP
from apex.contrib.sparsity.asp import eligible_modules
from apex.contrib.sparsity.permutation_lib import Permutation


@pytest.fixture(autouse=True)
def one_model_at_a_time():
    Permutation.set_search_options({"escape_attempts": 2})
    yield
    ASP.reset()
    Permutation.set_search_options(None)
    Permutation.set_permutation_saving_params(allow_permutation=True)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 16, 3, padding=1)  # 3 is no multiple of 16
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.norm = nn.BatchNorm2d(32)
        self.linear = nn.Linear(32, 16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.last = nn.Linear(16, 5)  # 5 is no multiple of 8

    def forward(self, x):
        x = torch.relu(self.norm(self.conv2(torch.relu(self.conv(x)))))
        x = self.linear(x.mean([2, 3]))[:, None]
        return self.last(self.attend(x, x, x, need_weights=False)[0][:, 0])


PRUNED = ["attend.in_proj_weight", "attend.out_proj.weight", "conv2.weight", "linear.weight"]


def batch(device, seed=1):
    torch.manual_seed(seed)
    return torch.randn(4, 3, 6, 6, device=device), torch.randint(5, (4,), device=device)


def train_step(net, optimizer, seed=1):
    x, target = batch(next(net.parameters()).device, seed)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), target).backward()
    optimizer.step()


def masks_of(net):
    return {k: v for k, v in net.state_dict().items() if k.endswith("_mma_mask")}


def assert_two_of_four(net, names=PRUNED):
    for name in names:
        weight = net.get_parameter(name).detach()
        rows = weight.movedim(1, -1).reshape(-1, 4)
        assert (rows != 0).sum(1).max() <= 2, name


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


@pytest.mark.parametrize("make", [sgd, lambda n: torch.optim.AdamW(n.parameters(), 1e-2)])
def test_stays_pruned(make, device):
    net = Network().to(device)
    optimizer = make(net)
    train_step(net, optimizer)
    ASP.prune_trained_model(net, optimizer)
    assert ASP.is_sparsity_enabled()
    assert_two_of_four(net)
    masks = copy.deepcopy(masks_of(net))
    assert sorted(masks) == sorted(
        f"{name.rpartition('.')[0]}.__{name.rpartition('.')[2]}_mma_mask" for name in PRUNED
    )
    before = net.linear.weight.detach().clone()
    for seed in range(3):
        train_step(net, optimizer, seed)
        assert_two_of_four(net)
    assert all(torch.equal(masks[name], mask) for name, mask in masks_of(net).items())
    assert not torch.equal(before, net.linear.weight)
    assert torch.equal(before != 0, net.linear.weight != 0)


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_step_with_closure_and_scheduler(scheduler_first):
    """Gradients are masked before the step, those of the closure too: momentum stays 0."""
    net = Network()
    optimizer = sgd(net)
    schedule = lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler = schedule() if scheduler_first else None
    ASP.prune_trained_model(net, optimizer)
    scheduler = scheduler or schedule()
    x, target = batch("cpu")

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), target)
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    scheduler.step()
    momentum = optimizer.state[net.linear.weight]["momentum_buffer"]
    mask = masks_of(net)["linear.__weight_mma_mask"]
    assert (momentum[~mask] == 0).all()
    assert (momentum[mask] != 0).any()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    ASP.reset()
    train_step(net, optimizer)  # its own step again
    assert (net.linear.weight[~mask] != 0).any() or net.linear.weight.grad[~mask].eq(0).all()


def test_masks_are_the_best(device):
    """Without permutation, kept weights are the two largest of each four, and are unchanged."""
    net = Network().to(device)
    before = copy.deepcopy(net)
    ASP.init_model_for_pruning(net, verbosity=0, allow_permutation=False)
    assert not ASP.is_sparsity_enabled()
    ASP.compute_sparse_masks()
    for name in PRUNED:
        dense = before.get_parameter(name).detach().movedim(1, -1).reshape(-1, 4)
        pruned = net.get_parameter(name).detach().movedim(1, -1).reshape(-1, 4)
        assert torch.equal(pruned, torch.where(pruned != 0, dense, 0))
        torch.testing.assert_close(
            pruned.abs().sort(1).values[:, 2:], dense.abs().sort(1).values[:, 2:]
        )


def test_permutation_keeps_the_function_and_more():
    net = Network().eval()
    x, _ = batch("cpu")
    plain, y = copy.deepcopy(net), net(x)
    ASP.init_model_for_pruning(net, verbosity=0, allow_recompute_mask=True)
    ASP.compute_sparse_masks()
    kept = sum(net.get_parameter(name).abs().sum().item() for name in PRUNED)
    ASP.restore_pruned_weights()
    assert not ASP.is_sparsity_enabled()
    torch.testing.assert_close(net(x), y, rtol=1e-5, atol=1e-5)
    expected = ["conv2.weight", "linear.weight", "attend.in_proj_weight"]
    assert Permutation.get_permutation_stats()[0] == expected
    ASP.reset()
    ASP.init_model_for_pruning(plain, verbosity=0, allow_permutation=False)
    ASP.compute_sparse_masks()
    assert kept > sum(plain.get_parameter(name).abs().sum().item() for name in PRUNED)


def test_recomputed_masks():
    net = Network()
    optimizer = sgd(net)
    ASP.init_model_for_pruning(net, verbosity=0, allow_recompute_mask=True, allow_permutation=False)
    ASP.init_optimizer_for_pruning(optimizer)
    dense = net.linear.weight.detach().clone()
    ASP.compute_sparse_masks()
    first = masks_of(net)["linear.__weight_mma_mask"].clone()
    lost = net.state_dict()["linear.__weight_mma_pruned_p"]
    assert torch.equal(net.linear.weight + lost, dense)
    with torch.no_grad():
        net.linear.weight.mul_(1e-9)  # so that what was lost is large now
    ASP.compute_sparse_masks()
    assert torch.equal(masks_of(net)["linear.__weight_mma_mask"], ~first)
    ASP.restore_pruned_weights()
    assert torch.equal(net.linear.weight, torch.where(first, dense * 1e-9, dense))
    assert not ASP.is_sparsity_enabled()
    ASP.compute_sparse_masks()
    assert_two_of_four(net)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_resume(keep, assign):
    """Save, build anew, load, go on: the same bits as without a break."""
    nets, states = [], None
    options = {"verbosity": 0, "allow_recompute_mask": keep}
    net = Network()
    optimizer = sgd(net)
    ASP.init_model_for_pruning(net, **options)
    ASP.init_optimizer_for_pruning(optimizer)
    ASP.compute_sparse_masks()
    train_step(net, optimizer)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train_step(net, optimizer, 2)
    nets.append(net)
    ASP.reset()

    file.seek(0)
    states = torch.load(file, weights_only=True)
    net = Network()
    ASP.init_model_for_pruning(net, **options)
    net.load_state_dict(states["net"], assign=assign)
    optimizer = sgd(net)
    optimizer.load_state_dict(states["optimizer"])
    ASP.init_optimizer_for_pruning(optimizer)
    assert ASP.is_sparsity_enabled()
    train_step(net, optimizer, 2)
    nets.append(net)
    left, right = (n.state_dict() for n in nets)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert_two_of_four(net)
    if keep:
        ASP.restore_pruned_weights()
    else:
        with pytest.raises(RuntimeError, match="allow_recompute_mask=True"):
            ASP.compute_sparse_masks()


class Scaled(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(size, size))

    def forward(self, x):
        return x @ self.matrix.t()


def test_which_layers(capsys):
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), Scaled(16), nn.Linear(16, 10))
    names = [name for name, _ in eligible_modules(net, [nn.Linear], None, ["1"])]
    assert names == ["0", "3"]
    net[0].weight.requires_grad_(False)
    ASP.init_model_for_pruning(net, custom_layer_dict={Scaled: ["matrix"]})
    assert list(masks_of(net)) == ["1.__weight_mma_mask", "2.__matrix_mma_mask"]
    text = capsys.readouterr().out
    assert "not pruned: 3.weight (10, 16)" in text
    assert "to be pruned: 2.matrix (16, 16) torch.float32" in text
    ASP.compute_sparse_masks()
    assert_two_of_four(net, ["1.weight", "2.matrix"])
    assert ASP.is_sparsity_enabled()
    ASP.reset()

    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    net[2].weight = net[1].weight
    ASP.init_model_for_pruning(
        net, verbosity=0, allowed_layer_names=["1", "2"], disallowed_layer_names=["2"]
    )
    assert list(masks_of(net)) == ["1.__weight_mma_mask"]
    ASP.reset()
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    net[1].weight = net[0].weight
    ASP.init_model_for_pruning(net, verbosity=0)
    assert list(masks_of(net)) == ["0.__weight_mma_mask"]  # tied: one mask


@pytest.mark.parametrize("pattern", ["m4n2_2d_best", "m4n2_2d_greedy"])
def test_patterns(pattern):
    net = Network().half()
    ASP.init_model_for_pruning(net, pattern, verbosity=0)
    ASP.compute_sparse_masks()
    assert ASP.is_sparsity_enabled()
    assert_two_of_four(net)
    columns = net.linear.weight.t().reshape(-1, 4)
    assert (columns != 0).sum(1).max() <= 2


def test_own_calculator():
    net = Network()
    ASP.init_model_for_pruning(net, lambda weight: weight.detach() > 0, verbosity=0)
    ASP.compute_sparse_masks()
    assert (net.linear.weight >= 0).all()
    ASP.reset()
    net = Network()
    before = copy.deepcopy(net.state_dict())
    ASP.init_model_for_pruning(
        net, lambda weight: torch.ones(2), verbosity=0, allow_permutation=False
    )
    with pytest.raises(ValueError, match=r"conv2.weight must be \[32, 16, 3, 3\], got \[2\]"):
        ASP.compute_sparse_masks()
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())


def test_partly_pruned():
    net = Network()
    ASP.init_model_for_pruning(net, verbosity=0)
    ASP.compute_sparse_masks()
    masks_of(net)["linear.__weight_mma_mask"].fill_(True)
    with pytest.raises(RuntimeError, match=r"more than half.*'linear.weight': 1.0"):
        ASP.is_sparsity_enabled()


def test_silence_and_questions(capsys):
    assert ASP.already_init_asp_model() is False
    net = Network()
    ASP.init_model_for_pruning(net, verbosity=0)
    ASP.compute_sparse_masks()
    assert ASP.already_init_asp_model() is True
    assert capsys.readouterr().out == ""


def test_permutation_is_forbidden_from_outside():
    net = Network()
    before = net.conv.weight.detach().clone()
    ASP.set_permutation_saving_params(allow_permutation=False)
    ASP.init_model_for_pruning(net, verbosity=0)
    ASP.compute_sparse_masks()
    assert torch.equal(net.conv.weight, before)


def test_calls_out_of_order():
    net = Network()
    for call in (ASP.compute_sparse_masks, ASP.restore_pruned_weights):
        with pytest.raises(RuntimeError, match=r"call ASP\.init_model_for_pruning first"):
            call()
    with pytest.raises(RuntimeError, match=r"call ASP\.init_model_for_pruning first"):
        ASP.init_optimizer_for_pruning(sgd(net))
    with pytest.raises(ValueError, match="which parameters of BatchNorm2d to prune"):
        ASP.init_model_for_pruning(net, whitelist=[nn.BatchNorm2d])
    with pytest.raises(ValueError, match="pattern: expected"):
        ASP.init_model_for_pruning(net, "2:4")
    assert masks_of(net) == {}
    ASP.init_model_for_pruning(net, verbosity=0)
    with pytest.raises(RuntimeError, match=r"call ASP.reset\(\)"):
        ASP.init_model_for_pruning(net)
    ASP.init_optimizer_for_pruning(sgd(net))
    with pytest.raises(RuntimeError, match="holds one optimizer"):
        ASP.init_optimizer_for_pruning(sgd(net))
    ASP.compute_sparse_masks()
    weight = net.linear.weight.detach().clone()
    for call in (ASP.compute_sparse_masks, ASP.restore_pruned_weights):
        with pytest.raises(RuntimeError, match="allow_recompute_mask=True"):
            call()
    assert torch.equal(net.linear.weight, weight)


def check_data_parallel(rank, world_size):
    """Both processes have one model with equal masks, as one process has on both batches."""
    Permutation.set_search_options({"escape_attempts": 2})
    net = Network()
    wrapped = nn.parallel.DistributedDataParallel(net)
    optimizer = sgd(net)
    ASP.prune_trained_model(wrapped, optimizer)
    for step in range(2):
        train_step(wrapped, optimizer, 10 * step + rank)
    assert Permutation.get_permutation_stats()[0]
    assert_two_of_four(net)
    state = {name: value.tolist() for name, value in net.named_parameters()}
    state |= {name: value.tolist() for name, value in masks_of(net).items()}
    every = [None] * world_size
    torch.distributed.all_gather_object(every, state)
    assert every[0] == every[1]
    ASP.reset()


def test_two_processes(two_ranks):
    two_ranks(check_data_parallel)
