"""Loading states: torch's hooks have their say, and a refused state changes nothing."""

import copy
import functools

import pytest
import torch

from apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

BF16 = torch.bfloat16
CASES = {
    "adagrad": (FusedAdagrad, "sum"),
    "adam": (FusedAdam, "exp_avg"),
    "adam_small": (
        functools.partial(FusedAdam, exp_avg_dtype=torch.float16, master_weights=True),
        "exp_avg",
    ),
    "lamb": (FusedLAMB, "exp_avg_sq"),
    "lars": (functools.partial(FusedLARS, momentum=0.9), "momentum_buffer"),
    "lamb_mixed": (
        functools.partial(FusedMixedPrecisionLamb, reduced_precision_dtype=BF16),
        "exp_avg",
    ),
    "novograd": (FusedNovoGrad, "exp_avg"),
    "sgd": (functools.partial(FusedSGD, momentum=0.9), "momentum_buffer"),
}
all_cases = pytest.mark.parametrize(("make", "key"), CASES.values(), ids=CASES.keys())


def make_params(device, dtype=torch.float32):
    return [torch.nn.Parameter(torch.ones(n, device=device, dtype=dtype)) for n in (3, 5)]


def saved_state(make, device, dtype=torch.float32):
    """The state of an optimizer of two parameters after a step."""
    params = make_params(device, dtype)
    optimizer = make(params, lr=0.5)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return copy.deepcopy(optimizer.state_dict())


def state_of(optimizer):
    return list(optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@all_cases
def test_what_a_pre_hook_returns_is_loaded(make, key, dtype, device):
    saved, params = saved_state(make, device, dtype), make_params(device, dtype)
    optimizer, calls = make(params, lr=0.1), []

    def zero_states(own, state_dict):
        calls.append(own)
        result = copy.deepcopy(state_dict)
        for entry in result["state"].values():
            entry[key].zero_()
        return result

    optimizer.register_load_state_dict_pre_hook(zero_states)
    optimizer.load_state_dict(saved)
    assert [id(own) for own in calls] == [id(optimizer)]
    assert all(optimizer.state[p][key].count_nonzero() == 0 for p in params)
    assert all(entry[key].count_nonzero() > 0 for entry in saved["state"].values())
    assert float(optimizer.param_groups[0]["lr"]) == 0.5


@all_cases
def test_a_pre_hook_may_change_groups(make, key, device):
    saved, params = saved_state(make, device), make_params(device)
    optimizer = make([{"params": [p]} for p in params], lr=0.1)

    def split(_, state_dict):
        (group,) = state_dict["param_groups"]
        groups = [{**group, "params": [index]} for index in group["params"]]
        if make is FusedNovoGrad:  # which has norms in the group
            for i, own in enumerate(groups):
                own["exp_avg_sq"] = [norms[i : i + 1] for norms in group["exp_avg_sq"]]
        state_dict["param_groups"] = groups

    optimizer.register_load_state_dict_pre_hook(split)
    optimizer.load_state_dict(saved)
    for loaded, own in zip(state_of(optimizer), saved["state"].values(), strict=True):
        assert torch.equal(loaded[key], own[key])
    assert len(saved["param_groups"]) == 1
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.5]


@all_cases
def test_what_a_post_hook_puts_into_the_state_stays(make, key, device):
    saved, params = saved_state(make, device), make_params(device)
    optimizer, seen = make(params, lr=0.1), []

    def replace(own):
        seen.append({p: own.state[p][key].dtype for p in params})
        for p in params:
            own.state[p][key] = torch.full_like(own.state[p][key], 0.25)

    optimizer.register_load_state_dict_post_hook(replace, prepend=True)
    optimizer.load_state_dict(saved)
    optimizer.load_state_dict(saved)
    assert len(seen) == 2
    # The hook sees what the optimizer will keep, not what torch has cast.
    assert seen[1] == {p: optimizer.state[p][key].dtype for p in params}
    assert all(optimizer.state[p][key].eq(0.25).all() for p in params)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()


BAD_STATES = {
    "int16": lambda key: {key: torch.zeros(5, dtype=torch.int16)},
    "uint8": lambda key: {key: torch.zeros(5, dtype=torch.uint8)},
    "number": lambda key: {key: 3.0},
    "text": lambda key: {key: "x"},
    "shape": lambda key: {key: torch.zeros(4)},
}


@pytest.mark.parametrize("bad", BAD_STATES.values(), ids=BAD_STATES.keys())
@all_cases
def test_a_refused_state_changes_nothing(make, key, bad, device):
    saved, params = saved_state(make, device), make_params(device)
    optimizer, posts = make(params, lr=0.1), []
    for p in params:
        p.grad = torch.full_like(p, 2.0)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(saved)
    wrong["state"][1].update(bad(key))
    optimizer.register_load_state_dict_pre_hook(lambda _, __: wrong)
    optimizer.register_load_state_dict_post_hook(posts.append)
    with pytest.raises(ValueError, match=f"load_state_dict: state '{key}'"):
        optimizer.load_state_dict(saved)
    assert not posts
    after = optimizer.state_dict()
    assert str(after) == str(before)
    # The refused attempt leaves nothing behind in the next.
    wrong["state"][1] = saved["state"][1]
    optimizer.load_state_dict(saved)
    assert len(posts) == 1
    assert torch.equal(state_of(optimizer)[1][key], saved["state"][1][key])


@pytest.mark.parametrize("step", [None, "x", torch.ones(2)], ids=["none", "text", "two"])
@pytest.mark.parametrize("where", ["parameter", "group"])
def test_a_step_that_is_no_number_is_refused(where, step, device):
    saved, params = saved_state(FusedAdam, device), make_params(device)
    optimizer = FusedAdam(params, lr=0.1)
    entries = saved["state"][1] if where == "parameter" else saved["param_groups"][0]
    entries["step"] = step
    with pytest.raises(ValueError, match=r"FusedAdam.load_state_dict: step must be a number"):
        optimizer.load_state_dict(saved)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(FusedAdam, master_weights=True),
        functools.partial(FusedAdam, master_weights=True, store_param_remainders=True),
        functools.partial(FusedMixedPrecisionLamb, reduced_precision_dtype=BF16),
    ],
    ids=["adam", "adam_remainders", "lamb_mixed"],
)
def test_a_master_must_be_whole(make, device):
    """Remainders, as TransformerEngine keeps them, are no masters without their parameters."""
    saved, params = saved_state(make, device, BF16), make_params(device, BF16)
    optimizer = make(params, lr=0.25)
    saved["state"][0]["master_param"] = torch.zeros(3, dtype=torch.int16)
    with pytest.raises(ValueError, match=r"'master_param' must be .* got \[3\] int16"):
        optimizer.load_state_dict(saved)
    assert not optimizer.state
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
