"""Checkpoints of FusedSGD: exchange with torch.optim.SGD, pickling, states that do not fit."""

import copy
import io

import pytest
import torch

from apex.optimizers.fused_sgd import FusedSGD
from apex_testkit import FLOATS
from apex_testkit.optimizers import run_steps

HYPER = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}


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


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_checkpoint_continues_bit_for_bit(dtype, momentum, device):
    value = torch.randn(37, device=device, dtype=dtype)
    grads = [[torch.randn_like(value)] for _ in range(6)]
    hyper = {"lr": 0.1, "momentum": momentum, "weight_decay": 0.01}
    straight = torch.nn.Parameter(value.clone())
    run_steps(FusedSGD, [straight], grads, **hyper)

    param = torch.nn.Parameter(value.clone())
    saved = save_and_load(run_steps(FusedSGD, [param], grads[:3], **hyper).state_dict())
    optimizer = FusedSGD([param], lr=1.0)
    optimizer.load_state_dict(saved)
    continue_with(optimizer, [param], grads[3:])
    assert torch.equal(param, straight)


@pytest.mark.parametrize("direction", ["from_torch", "to_torch"])
def test_state_passes_through_the_other_class_unchanged(direction, device):
    """Ours, theirs, ours (or the reverse) without a step between continues bit for bit."""
    own, other = torch.optim.SGD, FusedSGD
    if direction == "to_torch":
        own, other = other, own
    values = [torch.randn(n, device=device) for n in (3, 130)]
    grads = [[torch.randn_like(v) for v in values] for _ in range(6)]
    straight = [torch.nn.Parameter(v.clone()) for v in values]
    run_steps(own, straight, grads, **HYPER)

    params = [torch.nn.Parameter(v.clone()) for v in values]
    saved = save_and_load(run_steps(own, params, grads[:3], **HYPER).state_dict())
    between = other(params, lr=1.0)
    between.load_state_dict(saved)
    following = own(params, lr=1.0)
    following.load_state_dict(save_and_load(between.state_dict()))
    continue_with(following, params, grads[3:])
    assert all(torch.equal(p, s) for p, s in zip(params, straight, strict=True))


@pytest.mark.parametrize("direction", ["from_torch", "to_torch"])
@pytest.mark.parametrize("maximize", [False, True])
def test_training_goes_on_in_the_other_class(maximize, direction, device):
    classes = [torch.optim.SGD, FusedSGD]
    if direction == "to_torch":
        classes.reverse()
    hyper = {**HYPER, "maximize": maximize}
    values = [torch.randn(n, device=device, dtype=torch.float64) for n in (3, 130)]
    grads = [[torch.randn_like(v) for v in values] for _ in range(6)]
    straight = [torch.nn.Parameter(v.clone()) for v in values]
    run_steps(torch.optim.SGD, straight, grads, **hyper)

    params = [torch.nn.Parameter(v.clone()) for v in values]
    first = run_steps(classes[0], params, grads[:3], **hyper)
    following = classes[1](params, lr=1.0)
    following.load_state_dict(save_and_load(first.state_dict()))
    continue_with(following, params, grads[3:])
    for p, s in zip(params, straight, strict=True):
        torch.testing.assert_close(p, s, rtol=1e-12, atol=1e-12)  # float64, summed in other order


def test_checkpoint_in_apex_layout(device):
    """Apex's groups know neither maximize nor the choices of implementation."""
    param = torch.nn.Parameter(torch.zeros(5, device=device))
    state = run_steps(FusedSGD, [param], [[torch.ones_like(param)]], **HYPER).state_dict()
    for key in ("maximize", "foreach", "differentiable", "fused"):
        del state["param_groups"][0][key]
    optimizer = FusedSGD([param], lr=1.0)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["maximize"] is False
    optimizer.step()


def test_buffers_of_older_torch_may_be_none(device):
    param = torch.nn.Parameter(torch.zeros(5, device=device))
    state = FusedSGD([param], lr=0.5, momentum=0.9).state_dict()
    state["state"][0] = {"momentum_buffer": None}
    optimizer = FusedSGD([param], lr=1.0)
    optimizer.load_state_dict(state)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert param.eq(-0.5).all()


def test_buffers_of_another_layout_are_brought_into_the_parameters(device):
    value = torch.randn(2, 3, 4, 5, device=device)
    grads = [[torch.randn_like(value)] for _ in range(4)]
    straight = torch.nn.Parameter(value.clone())
    saved = run_steps(FusedSGD, [straight], grads[:2], **HYPER).state_dict()

    last = torch.nn.Parameter(straight.detach().clone(memory_format=torch.channels_last))
    optimizer = FusedSGD([last], lr=1.0)
    optimizer.load_state_dict(copy.deepcopy(saved))
    continue_with(optimizer, [last], grads[2:])
    again = FusedSGD([straight], lr=1.0)
    again.load_state_dict(saved)
    continue_with(again, [straight], grads[2:])
    assert optimizer.state[last]["momentum_buffer"].stride() == last.stride()
    assert torch.equal(last, straight)


def test_deepcopy_keeps_what_the_formula_depends_on(device):
    param = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = FusedSGD(
        [param], lr=0.1, momentum=0.5, weight_decay=0.5, wd_after_momentum=True, set_grad_none=True
    )
    optimizer.most_recent_scale = 4.0
    clone = copy.deepcopy(optimizer)
    own = clone.param_groups[0]["params"][0]
    for p, o in ((param, optimizer), (own, clone)):
        p.grad = torch.ones_like(p)
        for _ in range(2):
            o.step()
    assert clone.wd_after_momentum
    assert clone.set_grad_none
    assert torch.equal(param, own)


def test_a_state_that_does_not_fit_changes_nothing(device):
    param = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = run_steps(FusedSGD, [param], [[torch.ones_like(param)]], **HYPER)
    before = copy.deepcopy(optimizer.state_dict())
    other = torch.nn.Parameter(torch.ones(5))
    of_other = run_steps(FusedSGD, [other], [[torch.ones(5)]], **HYPER).state_dict()
    two = FusedSGD([torch.nn.Parameter(torch.ones(4)) for _ in range(2)], lr=0.5).state_dict()
    differentiable = copy.deepcopy(before)
    differentiable["param_groups"][0]["differentiable"] = True
    for state, message in (
        (of_other, r"'momentum_buffer' has shape \[5\].*\[4\] float32"),
        (two, r"groups of \[1\] parameters.*groups of \[2\]"),
        (differentiable, "differentiable=True"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    buffers = [s["state"][0]["momentum_buffer"] for s in (before, after)]
    assert torch.equal(*buffers)


def test_get_momentums_makes_what_is_missing(device):
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    optimizer = FusedSGD(params, lr=0.1, momentum=0.9)
    buffers, first_run = optimizer.get_momentums(params[:1])
    assert first_run
    assert buffers[0] is optimizer.state[params[0]]["momentum_buffer"]
    assert not buffers[0].any()
    assert not buffers[0].requires_grad
    buffers, first_run = optimizer.get_momentums(params)
    assert not first_run
    assert len(buffers) == 2
