"""FusedAdagrad against its formula in float64 and torch.optim.Adagrad; exchange of states."""

import copy

import pytest
import torch

from apex.optimizers import FusedAdagrad
from apex_testkit import FLOATS, LARGE, assert_as_accurate_as
from apex_testkit.optimizers import run_steps
from apex_testkit.optimizers_adagrad import adagrad_reference

SIZES = {
    "one": [1],
    "odd": [1, 7, 1023],
    "empty": [0, 5],
    "scalar": [()],
    "many": [3] * 200,
    "large": LARGE,
}
OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "decoupled": {"weight_decay": 0.1, "adagrad_w_mode": True},
    "eps": {"eps": 0.5},
    "maximize": {"weight_decay": 0.1, "maximize": True},
    "maximize_decoupled": {"weight_decay": 0.1, "maximize": True, "adagrad_w_mode": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_follows_the_formula(dtype, options, device):
    for sizes in SIZES.values():
        values = [torch.randn(n, device=device, dtype=dtype) for n in sizes]
        grads = [[torch.randn_like(v) for v in values] for _ in range(10)]
        params = [torch.nn.Parameter(v.clone()) for v in values]
        run_steps(FusedAdagrad, params, grads, lr=1e-2, **options)
        for i, (p, v) in enumerate(zip(params, values, strict=True)):
            own = [g[i] for g in grads]
            # The parameter is rounded once in each of ten steps.
            assert_as_accurate_as(
                lambda p, *g: adagrad_reference(p, *g, lr=1e-2, **options),
                p.detach(),
                v,
                *own,
                ulps=10,
            )


@pytest.mark.parametrize(
    "options", [o for o in OPTIONS.values() if "adagrad_w_mode" not in o], ids=str
)
def test_hundred_steps_match_torch_adagrad(options, device):
    model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.GELU(), torch.nn.Linear(65, 5))
    model.to(device, torch.float64)
    twin = copy.deepcopy(model)
    ours = FusedAdagrad(model.parameters(), lr=1e-2, **options)
    theirs = torch.optim.Adagrad(twin.parameters(), lr=1e-2, **options)
    x = torch.randn(16, 33, device=device, dtype=torch.float64)
    for _ in range(100):
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            net(x).sin().mean().backward()
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        # Both round in float64, in another order; 100 steps multiply that by less than 1e4.
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_the_state_is_wide_and_counts_own_steps(device):
    params = [torch.nn.Parameter(torch.ones(3, device=device).to(d)) for d in FLOATS]
    optimizer = run_steps(FusedAdagrad, params, [[torch.ones_like(p) for p in params]] * 2)
    params[0].grad = None
    optimizer.step()
    wide = [optimizer.state[p]["sum"].dtype for p in params]
    assert wide == [torch.float64, torch.float32, torch.float32, torch.float32]
    assert [int(optimizer.state[p]["step"]) for p in params] == [2, 3, 3, 3]
    assert "step" not in optimizer.param_groups[0]
    # 2 ** -10 is lost beside 1 in bfloat16, and in a sum of that dtype.
    params[3].grad = torch.full_like(params[3], 2**-5)
    optimizer.step()
    assert optimizer.state[params[3]]["sum"].eq(3 + 2**-10).all()


def continue_with(optimizer, params, grads_per_step):
    for grads in grads_per_step:
        for p, g in zip(params, grads, strict=True):
            p.grad = None if g is None else g.clone()
        optimizer.step()


@pytest.mark.parametrize("direction", ["from_torch", "to_torch"])
def test_state_passes_through_the_other_class_unchanged(direction, device):
    """Ours, theirs, ours (or the reverse) without a step between continues bit for bit."""
    own, other = torch.optim.Adagrad, FusedAdagrad
    if direction == "to_torch":
        own, other = other, own
    values = [torch.randn(n, device=device) for n in (3, 130)]
    grads = [[torch.randn_like(v) for v in values] for _ in range(6)]
    straight = [torch.nn.Parameter(v.clone()) for v in values]
    run_steps(own, straight, grads, lr=0.1, weight_decay=0.1)

    params = [torch.nn.Parameter(v.clone()) for v in values]
    first = run_steps(own, params, grads[:3], lr=0.1, weight_decay=0.1)
    between = other(params, lr=1.0)
    between.load_state_dict(first.state_dict())
    following = own(params, lr=1.0)
    following.load_state_dict(between.state_dict())
    continue_with(following, params, grads[3:])
    assert all(torch.equal(p, s) for p, s in zip(params, straight, strict=True))


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("direction", ["from_torch", "to_torch"])
def test_training_goes_on_in_the_other_class(direction, started, device):
    """Also of a parameter that has no gradient before, whose state torch expects all the same."""
    classes = [torch.optim.Adagrad, FusedAdagrad]
    if direction == "to_torch":
        classes.reverse()
    hyper = {"lr": 0.1, "weight_decay": 0.1, "maximize": True}
    values = [torch.randn(n, device=device, dtype=torch.float64) for n in (3, 130)]
    grads = [[torch.randn_like(v) for v in values] for _ in range(6)]
    if not started:
        grads[:3] = [[None, g] for _, g in grads[:3]]
    params = [torch.nn.Parameter(v.clone()) for v in values]
    first = classes[0](params, **hyper)
    continue_with(first, params, grads[:3])
    following = classes[1](params, lr=1.0)
    following.load_state_dict(copy.deepcopy(first.state_dict()))
    continue_with(following, params, grads[3:])
    for i, (p, v) in enumerate(zip(params, values, strict=True)):
        own = [g[i] for g in grads if g[i] is not None]
        expected = adagrad_reference(v, *own, **hyper)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)
        assert int(following.state[p]["step"]) == len(own)


def test_torchs_initial_value_counts(device):
    """In the saved sums, and in the group for parameters that have none yet."""
    param = torch.nn.Parameter(torch.ones(3, device=device))
    theirs = torch.optim.Adagrad([param], lr=0.5, initial_accumulator_value=3.0)
    for state in (theirs.state_dict(), {**theirs.state_dict(), "state": {}}):
        ours = FusedAdagrad([param])
        ours.load_state_dict(state)
        with torch.no_grad():
            param.fill_(1)
        param.grad = torch.ones_like(param)
        ours.step()
        torch.testing.assert_close(param.detach(), torch.full((3,), 0.75, device=device))


def test_options_of_torch_that_are_missing_are_refused(device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = run_steps(FusedAdagrad, [param], [[torch.ones_like(param)]])
    before = copy.deepcopy(optimizer.state_dict())
    for option, message in (
        ({"lr_decay": 0.1}, r"FusedAdagrad.load_state_dict: lr_decay must be 0, got 0.1. Use"),
        ({"differentiable": True}, "differentiable=True is not supported"),
    ):
        theirs = torch.optim.Adagrad([param], **option)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(theirs.state_dict())
        with pytest.raises(ValueError, match=message.replace(".load_state_dict", "")):
            FusedAdagrad([{"params": [param], **option}])
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert torch.equal(optimizer.state[param]["sum"], before["state"][0]["sum"])


def test_apexs_states_have_no_step(device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    state = run_steps(FusedAdagrad, [param], [[torch.ones_like(param)]] * 2).state_dict()
    keys = ("params", "lr", "eps", "weight_decay")
    state["param_groups"] = [{k: g[k] for k in keys} for g in state["param_groups"]]
    del state["state"][0]["step"]
    optimizer = FusedAdagrad([param], lr=1.0)
    optimizer.load_state_dict(state)
    param.grad = torch.ones_like(param)
    before = param.detach().clone()
    optimizer.step()
    torch.testing.assert_close(before - param.detach(), torch.full_like(before, 1e-2 / 3**0.5))


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay", "initial_accumulator_value"])
def test_negative_numbers_of_a_group_are_refused(name):
    group = {"params": [torch.nn.Parameter(torch.ones(2))], name: -0.5}
    with pytest.raises(ValueError, match=f"FusedAdagrad: {name} must be >= 0, got -0.5"):
        FusedAdagrad([group])
