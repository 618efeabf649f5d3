"""State dicts of DistributedFusedAdam: other ranks, other options, torch's optimizers."""

import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam, for_torch

SHAPES = [(6, 5), (17,), (2, 3, 4, 5), (), (300,)]
HYPER = {"lr": 1e-2, "weight_decay": 0.1}
KEYS = ("param", "exp_avg", "exp_avg_sq")


def parameters(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    values = [torch.randn(shape).to(dtype) for shape in SHAPES]
    values[2] = values[2].contiguous(memory_format=torch.channels_last)
    return [nn.Parameter(value) for value in values]


def give_gradients(params, step):
    """The same on all ranks: their average is exact."""
    torch.manual_seed(step)
    for param in params:
        param.grad = torch.empty_like(param).copy_(torch.randint(-9, 9, param.shape))


def take_steps(optimizer, steps):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        give_gradients(params, step)
        optimizer.step()
        optimizer.zero_grad()


def group_of(world, size):
    groups = [dist.new_group(range(size)), *(dist.new_group([r]) for r in range(size, world))]
    return groups[max(0, dist.get_rank() - size + 1)]


def make(params, **options):
    hyper = {**HYPER, **options}
    return DistributedFusedAdam(params, **{"bucket_cap_mb": 0.0005, **hyper})


def check_other_ranks(rank, world):
    params = parameters()
    optimizer = make([{"params": params[:2]}, {"params": params[2:], "lr": 1e-3}])
    take_steps(optimizer, range(3))
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    assert saved["format"] == 2
    assert saved["state"]["step"] == 3
    for i, p in enumerate(params):
        assert saved["state"][i]["param"].shape == p.shape
        assert torch.equal(saved["state"][i]["param"], p)
    take_steps(optimizer, range(3, 6))
    for size in (1, 2, 3):
        others = parameters(seed=size)
        other = make(
            [{"params": others[:2]}, {"params": others[2:]}],
            process_group=group_of(world, size),
            bucket_cap_mb=0.002 * size,
        )
        other.load_state_dict(saved)
        for a, i in zip(others, range(5), strict=True):
            assert torch.equal(a, saved["state"][i]["param"])
        take_steps(other, range(3, 6))
        for a, b in zip(others, params, strict=True):
            assert torch.equal(a, b)
        again, expected = other.state_dict()["state"], optimizer.state_dict()["state"]
        assert all(torch.equal(again[i][k], expected[i][k]) for i in range(5) for k in KEYS)
    assert saved["param_groups"] == kept["param_groups"]
    assert saved["state"].keys() == kept["state"].keys()


def test_other_numbers_of_ranks(four_ranks):
    four_ranks(check_other_ranks)


OPTIONS = {
    "plain": {},
    "contiguous": {"contiguous_param_buffer": True, "param_sync_dtype": torch.bfloat16},
    "own": {"store_params": False},
    "remainders": {
        "store_params": False,
        "store_param_remainders": True,
        "param_sync_dtype": torch.bfloat16,
    },
    "scaled": {
        "with_scaled_states": True,
        "dtype": torch.float16,
        "param_sync_dtype": torch.bfloat16,
    },
    "bytes": {"param_sync_dtype": torch.int8},
    "capturable": {"capturable": True},
}


def check_options(rank, world, name):
    """Any options save, and load what the same options saved, bit for bit."""
    options = OPTIONS[name]
    params, others = parameters(torch.bfloat16), parameters(torch.bfloat16, seed=1)
    optimizer, other = make(params, **options), make(others, **options)
    take_steps(optimizer, range(3))
    saved = optimizer.state_dict()
    take_steps(optimizer, range(3, 5))
    other.load_state_dict(saved)
    assert int(other.state["step"]) == 3
    take_steps(other, range(3, 5))
    for a, b in zip(others, params, strict=True):
        assert torch.equal(a, b)
    # What plain options saved loads, too; its values are rounded to what is kept.
    plain = make(parameters(torch.bfloat16))
    take_steps(plain, range(3))
    expected = plain.state_dict()
    other.load_state_dict(expected)
    for i in range(5):
        for key in KEYS:
            loaded = other.state_dict()["state"][i][key].double()
            error = (loaded - expected["state"][i][key].double()).abs().max()
            assert error <= 2.0**-8 * expected["state"][i][key].abs().max(), (i, key)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(two_ranks, name):
    two_ranks(check_options, name=name)


def check_torch(rank, world):
    """Into torch.optim.AdamW and back, without a change of a bit; steps then agree."""
    params = parameters()
    optimizer = make(params)
    take_steps(optimizer, range(3))
    saved = optimizer.state_dict()
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    plain = torch.optim.AdamW(copies)
    plain.load_state_dict(for_torch(saved))
    for i, copied in enumerate(copies):
        for key in KEYS[1:]:
            assert torch.equal(plain.state[copied][key], saved["state"][i][key])
    assert plain.param_groups[0]["lr"] == HYPER["lr"]
    back = make([nn.Parameter(p.detach().clone()) for p in params])
    back.load_state_dict(plain.state_dict())
    loaded = back.state_dict()["state"]
    assert loaded["step"] == 3
    assert all(torch.equal(loaded[i][k], saved["state"][i][k]) for i in range(5) for k in KEYS)
    for each in (optimizer, plain, back):
        take_steps(each, range(3, 6))
    for a, b, c in zip(params, copies, back.param_groups[0]["params"], strict=True):
        assert torch.equal(a, c)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_torch_adamw(two_ranks, four_ranks):
    two_ranks(check_torch)
    four_ranks(check_torch)


def check_first_format(rank, world, gather):
    params, others = parameters(), parameters(seed=1)
    optimizer, other = make(params), make(others)
    for each in (optimizer, other):
        each.init_params()
    take_steps(optimizer, range(3))
    with pytest.warns(FutureWarning, match="use format 2") as caught:
        saved = optimizer.state_dict(state_dict_format=1, gather_on_root=gather)
    assert caught[0].filename == __file__
    assert (saved is None) == (gather and rank > 0)
    if gather:
        boxes = [saved]
        dist.broadcast_object_list(boxes, 0)
        saved = boxes[0]
        assert len(saved["gathered_states"]) == world
    assert saved["format"] == 1
    other.load_state_dict(saved)
    for each in (optimizer, other):
        take_steps(each, range(3, 5))
    for a, b in zip(others, params, strict=True):
        assert torch.equal(a, b)
    third = make(parameters(), bucket_cap_mb=1)
    with pytest.raises(ValueError, match="laid out in another way"):
        third.load_state_dict(saved)
    scaled = make(parameters(torch.float16), **OPTIONS["scaled"])
    warnings.simplefilter("ignore", FutureWarning)
    with pytest.raises(NotImplementedError, match="format 1 has no scaled states"):
        scaled.state_dict(state_dict_format=1)


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "local"])
def test_first_format(two_ranks, gather):
    two_ranks(check_first_format, gather=gather)


def check_sharded(rank, world, folder, name):
    """torch.distributed.checkpoint: written by four ranks, read by two with other buckets."""
    options = OPTIONS[name]
    params = parameters(torch.bfloat16)
    optimizer = make(params, **options)
    take_steps(optimizer, range(3))
    dcp.save(optimizer.sharded_state_dict(), checkpoint_id=folder)
    take_steps(optimizer, range(3, 5))
    group, others = group_of(world, 2), parameters(torch.bfloat16, seed=1)
    if rank < 2:
        other = make(others, **options, process_group=group, bucket_cap_mb=0.003)
        state = other.sharded_state_dict()
        dcp.load(state, checkpoint_id=folder, process_group=group)
        other.load_sharded_state_dict(state)
        take_steps(other, range(3, 5))
        for a, b in zip(others, params, strict=True):
            # With scales, a fragment of another size may round in another way.
            torch.testing.assert_close(a, b, rtol=0.02 * (name == "scaled"), atol=0)


@pytest.mark.parametrize("name", ["plain", "own", "remainders", "scaled"])
def test_distributed_checkpoint(four_ranks, tmp_path, name):
    four_ranks(check_sharded, folder=str(tmp_path / "state"), name=name)


def check_empty(rank, world, folder):
    params = [*parameters(), nn.Parameter(torch.zeros(0, 3))]
    optimizer = make(params)
    optimizer.init_params_bucket(params)
    take_steps(optimizer, range(2))
    dcp.save(optimizer.sharded_state_dict(), checkpoint_id=folder)
    state = optimizer.sharded_state_dict()
    dcp.load(state, checkpoint_id=folder)
    optimizer.load_sharded_state_dict(state)
    assert int(optimizer.state["step"]) == 2


def test_a_parameter_without_elements(two_ranks, tmp_path):
    """Its fragments wait for the others, and no rank writes anything of it."""
    two_ranks(check_empty, folder=str(tmp_path / "state"))


def check_no_states(optimizer, saved):
    """What is no state at all, or not one of this format."""
    needed = r"with 'state' and 'param_groups'|step must be >= 0"
    for misfit in (None, {}, {"state": {}}, {**saved, "state": {**saved["state"], "step": -1}}):
        with pytest.raises(ValueError, match=needed):
            optimizer.load_state_dict(misfit)
    with pytest.raises(ValueError, match=needed):
        optimizer.load_sharded_state_dict({})
    for misfit in ({}, {**saved, "format": 1}, {**saved, "state": {}}):
        with pytest.raises(ValueError, match="for_torch: the state must be"):
            for_torch(misfit)


def check_misfits(rank, world):
    params = parameters()
    optimizer = make(params)
    take_steps(optimizer, range(2))
    saved, before = optimizer.state_dict(), [p.detach().clone() for p in params]

    def edited(**changes):
        return {**saved, **changes}

    entry = saved["state"][1]
    group = saved["param_groups"][0]
    misfits = {
        "format must be 1 or 2, got 3": edited(format=3),
        "has shape": edited(state={**saved["state"], 1: {**entry, "exp_avg": torch.ones(3)}}),
        "floating-point tensor": edited(state={**saved["state"], 1: {**entry, "exp_avg": 1}}),
        r"groups of \[5\]": edited(param_groups=[{**group, "params": [0, 1]}]),
        "amsgrad": edited(param_groups=[{**group, "amsgrad": True}]),
        "adam_w_mode=False": edited(param_groups=[{**group, "decoupled_weight_decay": False}]),
        "betas must be": edited(param_groups=[{**group, "betas": (2, 0)}]),
        "different numbers of steps": edited(
            state={0: {**entry, "param": None, "step": 1, "exp_avg": before[0] * 0,
                       "exp_avg_sq": before[0] * 0}, 1: {**entry, "step": 2}}
        ),
    }  # fmt: skip
    for text, misfit in misfits.items():
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(misfit)
    check_no_states(optimizer, saved)
    for p, q in zip(params, before, strict=True):
        assert torch.equal(p, q)
    with pytest.raises(ValueError, match="state_dict_format must be"):
        optimizer.state_dict(state_dict_format=3)
    with pytest.raises(ValueError, match="gather_on_root is only"):
        optimizer.state_dict(gather_on_root=True)
    again = optimizer.state_dict()["state"]
    assert all(torch.equal(again[i][k], saved["state"][i][k]) for i in range(5) for k in KEYS)


def test_what_does_not_fit_changes_nothing(two_ranks):
    two_ranks(check_misfits)


def check_order(rank, world):
    """Buckets in the order of gradients are the same after loading: sums are rounded alike."""
    torch.manual_seed(rank)
    params, saved = [nn.Parameter(torch.ones(50, 7)) for _ in range(3)], None
    optimizer = make(params)
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        if step == 2:
            saved = optimizer.state_dict()
            assert saved["bucket_order"] == [1, 2, 0]
            assert all(set(saved["state"][i]) == set(KEYS) for i in range(3))
        loss = sum((params[i] * torch.randn(50, 7)).sum() for i in (0, 2, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    others = [nn.Parameter(torch.zeros(50, 7)) for _ in range(3)]
    other = make(others)
    other.load_state_dict(saved)
    for step in (2, 3):
        torch.manual_seed(10 * step + rank)
        loss = sum((others[i] * torch.randn(50, 7)).sum() for i in (0, 2, 1))
        loss.backward()
        other.step()
        other.zero_grad()
    for a, b in zip(others, params, strict=True):
        assert torch.equal(a, b)


def test_buckets_have_the_saved_order(four_ranks):
    four_ranks(check_order)


def check_scheduler(rank, world):
    params = parameters()
    optimizer = make(params)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    take_steps(optimizer, [0])
    scheduler.step()
    assert math.isclose(optimizer.param_groups[0]["lr"], HYPER["lr"] / 2)
    other = make(parameters())
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["initial_lr"] == HYPER["lr"]


def test_a_scheduler(two_ranks):
    two_ranks(check_scheduler)


def check_states_of_new_parameters(rank, world):
    """Parameters that no backward has seen have a state: before a step, and after a new group."""
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((2,), 5.0))
    optimizer = DistributedFusedAdam([first], lr=0.1)

    def train(*params):
        sum(param.sum() for param in params).backward()
        optimizer.step()
        optimizer.zero_grad()

    for format_ in (2, 1):
        saved = copy.deepcopy(optimizer.state_dict(**how(format_)))
        before = first.detach().clone()
        train(first)
        optimizer.load_state_dict(saved)
        assert torch.equal(first, before), format_
    train(first)
    optimizer.add_param_group({"params": [second], "weight_decay": 0.1})
    for format_ in (2, 1):
        saved = copy.deepcopy(optimizer.state_dict(**how(format_)))
        before = [param.detach().clone() for param in (first, second)]
        train(first, second)
        assert not torch.equal(second, before[1])
        optimizer.load_state_dict(saved)
        assert all(map(torch.equal, (first, second), before)), format_
    entry = optimizer.state_dict()["state"][1]
    assert torch.equal(entry["param"], before[1])
    assert not entry["exp_avg"].any()
    assert not entry["exp_avg_sq"].any()


def how(format_):
    return {"state_dict_format": 1, "gather_on_root": False} if format_ == 1 else {}


@pytest.mark.filterwarnings("ignore:.*format 1 loads only")
def test_states_of_new_parameters(two_ranks):
    two_ranks(check_states_of_new_parameters)
