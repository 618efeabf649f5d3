"""Checkpoints and copies of FusedAdagrad, FusedNovoGrad and FusedLARS."""

import copy
import functools
import io

import pytest
import torch

from apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedNovoGrad,
    FusedSGD,
)
from apex_testkit import FLOATS
from apex_testkit.optimizers import run_steps

CASES = {
    "adagrad": functools.partial(FusedAdagrad, lr=0.1, weight_decay=0.1, adagrad_w_mode=True),
    "novograd": functools.partial(FusedNovoGrad, lr=0.1, weight_decay=0.1, reg_inside_moment=True),
    "lars": functools.partial(FusedLARS, lr=0.1, momentum=0.9, trust_coefficient=0.5),
}
all_cases = pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())


def save_and_load(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def continue_with(optimizer, params, grads_per_step):
    for grads in grads_per_step:
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()


OPTIONS = ("lr", "betas", "eps", "weight_decay", "momentum")


@pytest.mark.parametrize("make", [*CASES.values(), FusedAdam, FusedLAMB, FusedSGD])
def test_a_group_without_its_options_is_refused(make):
    """As where a bit of a name has turned; that was replaced by a default."""
    optimizer = make([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    saved, names = optimizer.state_dict(), [o for o in OPTIONS if o in optimizer.defaults]
    assert len(names) > 2
    for name in names:
        state = copy.deepcopy(saved)
        state["param_groups"][0]['"' + name[1:]] = state["param_groups"][0].pop(name)
        with pytest.raises(ValueError, match=rf"load_state_dict: param_groups\[0\] has no {name};"):
            optimizer.load_state_dict(state)
    assert repr(optimizer.state_dict()) == repr(saved)


@pytest.mark.parametrize("steps", [0, 3])
@all_cases
def test_checkpoint_continues_bit_for_bit(make, steps, device):
    """Also one from before the first step."""
    values = [torch.randn(37 + i, device=device, dtype=d) for i, d in enumerate(FLOATS)]
    grads = [[torch.randn_like(v) for v in values] for _ in range(6)]
    straight = [torch.nn.Parameter(v.clone()) for v in values]
    run_steps(make, straight, grads)

    params = [torch.nn.Parameter(v.clone()) for v in values]
    saved = save_and_load(run_steps(make, params, grads[:steps]).state_dict())
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer = make(resumed, lr=1.0)
    optimizer.load_state_dict(saved)
    continue_with(optimizer, resumed, grads[steps:])
    assert all(torch.equal(p, s) for p, s in zip(resumed, straight, strict=True))


@all_cases
def test_loading_into_an_optimizer_that_has_stepped(make, device):
    values = [torch.randn(37, device=device) for _ in range(2)]
    grads = [[torch.randn_like(v) for v in values] for _ in range(4)]
    straight = [torch.nn.Parameter(v.clone()) for v in values]
    saved = save_and_load(run_steps(make, straight, grads[:2]).state_dict())
    params = [torch.nn.Parameter(p.detach().clone()) for p in straight]
    optimizer = run_steps(make, params, grads)
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for p, s in zip(params, straight, strict=True):
            p.copy_(s)
    continue_with(optimizer, params, grads[2:])
    other = make(straight)
    other.load_state_dict(saved)
    continue_with(other, straight, grads[2:])
    assert all(torch.equal(p, s) for p, s in zip(params, straight, strict=True))


@all_cases
def test_state_of_another_model_changes_nothing(make, device):
    param = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = run_steps(make, [param], [[torch.ones_like(param)]])
    before = copy.deepcopy(optimizer.state_dict())
    other = torch.nn.Parameter(torch.ones(5))
    of_other = run_steps(make, [other], [[torch.ones(5)]]).state_dict()
    of_two = make([torch.nn.Parameter(torch.ones(4)) for _ in range(2)]).state_dict()
    for state, message in (
        (of_other, r"has shape \[5\].*\[4\] float32"),
        (of_two, r"groups of \[1\] parameters.*groups of \[2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert str(after["param_groups"]) == str(before["param_groups"])
    for key, value in before["state"][0].items():
        assert torch.equal(after["state"][0][key], value)


@all_cases
def test_deepcopy_goes_on_alike(make, device):
    value = torch.randn(9, device=device)
    grads = [[torch.randn_like(value)] for _ in range(3)]
    param = torch.nn.Parameter(value.clone())
    optimizer = run_steps(make, [param], grads[:2])
    clone = copy.deepcopy(optimizer)
    own = clone.param_groups[0]["params"][0]
    assert own is not param
    continue_with(optimizer, [param], grads[2:])
    continue_with(clone, [own], grads[2:])
    assert torch.equal(param, own)
    clone.zero_grad()
    assert own.grad is None


@all_cases
def test_buffers_of_another_layout_are_brought_into_the_parameters(make, device):
    value = torch.randn(2, 3, 4, 5, device=device)
    grads = [[torch.randn_like(value)] for _ in range(4)]
    straight = torch.nn.Parameter(value.clone())
    saved = run_steps(make, [straight], grads[:2]).state_dict()
    last = torch.nn.Parameter(straight.detach().clone(memory_format=torch.channels_last))
    for param in (last, straight):
        optimizer = make([param])
        optimizer.load_state_dict(copy.deepcopy(saved))
        continue_with(optimizer, [param], grads[2:])
        moments = [s for k, s in optimizer.state[param].items() if k != "step"]
        assert [m.stride() for m in moments] == [param.stride()]
    # Norms are summed in the order of memory, which differs.
    torch.testing.assert_close(last, straight, rtol=1e-5, atol=1e-6)


def novograd_state(device, dtypes, seen):
    """A state of FusedNovoGrad after one step with gradients for the parameters in ``seen``."""
    params = [torch.nn.Parameter(torch.ones(4, device=device).to(d)) for d in dtypes]
    optimizer = FusedNovoGrad(params, lr=0.1)
    for i in seen:
        params[i].grad = torch.full_like(params[i], i + 1.0)
    optimizer.step()
    return params, optimizer.state_dict()


def test_novograds_norms_in_apexs_layout(device):
    """Apex has no numbers for parameters that never had a gradient, and no step in the state."""
    dtypes = [torch.float32, torch.float16, torch.float32, torch.float16]
    params, state = novograd_state(device, dtypes, seen=[1, 2, 3])
    group = state["param_groups"][0]
    group["exp_avg_sq"] = [torch.tensor([4.0, 8.0]), torch.tensor([6.0])]
    group["step"] = 3
    for entry in state["state"].values():
        del entry["step"]
    optimizer = FusedNovoGrad(params)
    optimizer.load_state_dict(state)
    norms = optimizer.param_groups[0]["exp_avg_sq"]
    assert [n.tolist() for n in norms] == [[4.0, 8.0], [0.0, 6.0]]
    assert norms[0].device == params[0].device
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [1, 4, 4, 4]
    assert norms[1][0].item() == 2.0
    assert optimizer.param_groups[0]["step"] == 4


def test_novograds_norms_of_masters_fit_the_model(device):
    """Saved while float32 masters stood in the group, loaded before amp has put them there."""
    _, state = novograd_state(device, [torch.float32] * 2, seen=[0, 1])
    params = [torch.nn.Parameter(torch.ones(4, device=device).half()) for _ in range(2)]
    optimizer = FusedNovoGrad(params)
    optimizer.load_state_dict(state)
    norms = optimizer.param_groups[0]["exp_avg_sq"]
    assert [n.tolist() for n in norms] == [[2.0, 4.0], []]


def test_novograds_norms_that_do_not_fit(device):
    params, state = novograd_state(device, [torch.float32] * 3, seen=[0, 1, 2])
    optimizer = FusedNovoGrad(params)
    state["param_groups"][0]["exp_avg_sq"] = [torch.ones(0), torch.ones(2)]
    with pytest.raises(
        ValueError, match=r"exp_avg_sq\[1\] holds 2 norms, but the group has 3 float32 parameters"
    ):
        optimizer.load_state_dict(state)
    del state["param_groups"][0]["exp_avg_sq"]
    with pytest.raises(ValueError, match="the state has moments, but no 'exp_avg_sq'"):
        optimizer.load_state_dict(state)
    assert not optimizer.state
