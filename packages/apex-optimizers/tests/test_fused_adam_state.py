"""Checkpoints of FusedAdam: resuming bit for bit, and exchange with torch.optim and Apex."""

import copy
import io

import pytest
import torch

from apex.optimizers import FusedAdam
from apex_testkit import FLOATS
from apex_testkit.optimizers import adam_reference, run_steps


def save_and_load(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("master_weights", [False, True])
def test_checkpoint_continues_bit_for_bit(dtype, master_weights, device):
    value = torch.randn(37, device=device, dtype=dtype)
    grads = [[torch.randn_like(value)] for _ in range(6)]
    options = {"lr": 0.1, "weight_decay": 0.01, "master_weights": master_weights}
    straight = torch.nn.Parameter(value.clone())
    run_steps(FusedAdam, [straight], grads, **options)

    param = torch.nn.Parameter(value.clone())
    saved = save_and_load(run_steps(FusedAdam, [param], grads[:3], **options).state_dict())
    resumed = torch.nn.Parameter(param.detach().clone())
    optimizer = FusedAdam([resumed], **options)
    optimizer.load_state_dict(saved)
    for g in grads[3:]:
        resumed.grad = g[0].clone()
        optimizer.step()
    assert torch.equal(resumed, straight)


@pytest.mark.parametrize("direction", ["from_torch", "to_torch"])
def test_checkpoints_exchange_with_torch_adamw(direction, device):
    torch.manual_seed(1)
    values = [torch.randn(n, device=device, dtype=torch.float64) for n in (3, 8)]
    grads = [[torch.randn_like(v) for v in values] for _ in range(6)]
    classes = [torch.optim.AdamW, FusedAdam]
    if direction == "to_torch":
        classes.reverse()
    params = [torch.nn.Parameter(v.clone()) for v in values]
    optimizer = classes[0](params, lr=0.1, weight_decay=0.1)
    for step_grads in grads[:3]:
        for p, g in zip(params, step_grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    following = classes[1](params, lr=0.1, weight_decay=0.1)
    following.load_state_dict(save_and_load(optimizer.state_dict()))
    for step_grads in grads[3:]:
        for p, g in zip(params, step_grads, strict=True):
            p.grad = g.clone()
        following.step()
    for i, (p, v) in enumerate(zip(params, values, strict=True)):
        expected = adam_reference(v, *(g[i] for g in grads), lr=0.1, weight_decay=0.1)
        torch.testing.assert_close(p.detach(), expected)


def test_checkpoint_in_apex_layout_with_group_step(device):
    """Apex keeps the step in the group and nothing of it per parameter."""
    value = torch.randn(5, device=device, dtype=torch.float64)
    grads = [torch.randn_like(value) for _ in range(4)]
    param = torch.nn.Parameter(value.clone())
    state = run_steps(FusedAdam, [param], [[g] for g in grads[:2]], lr=0.1).state_dict()
    del state["state"][0]["step"]
    optimizer = FusedAdam([param], lr=0.1)
    optimizer.load_state_dict(state)
    for g in grads[2:]:
        param.grad = g
        optimizer.step()
    torch.testing.assert_close(param.detach(), adam_reference(value, *grads, lr=0.1))


def test_checkpoint_of_another_model_changes_nothing(device):
    param = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = run_steps(FusedAdam, [param], [[torch.ones(4, device=device)]])
    before = copy.deepcopy(optimizer.state_dict())
    other = run_steps(
        FusedAdam, [torch.nn.Parameter(torch.ones(5))], [[torch.ones(5)]]
    ).state_dict()
    with pytest.raises(ValueError, match=r"'exp_avg' has shape \[5\].*\[4\] float32"):
        optimizer.load_state_dict(other)
    two = FusedAdam([torch.nn.Parameter(torch.ones(4)) for _ in range(2)]).state_dict()
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters.*groups of \[2\]"):
        optimizer.load_state_dict(two)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, value in before["state"][0].items():
        assert torch.equal(after["state"][0][key], value)


@pytest.mark.parametrize("ours_decoupled", [True, False])
def test_a_state_of_the_other_formula_is_refused(ours_decoupled, device):
    """Adam's decay is in the gradient, AdamW's is not: the run would go on with other steps."""
    params = [torch.nn.Parameter(torch.ones(4, device=device))]
    theirs = torch.optim.Adam if ours_decoupled else torch.optim.AdamW
    state = theirs(params, weight_decay=0.1).state_dict()
    optimizer = FusedAdam(params, adam_w_mode=ours_decoupled, weight_decay=0.5)
    needed = f"the state comes from Adam.* adam_w_mode={not ours_decoupled}"
    with pytest.raises(ValueError, match=needed):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    state["param_groups"][0]["weight_decay"] = 0.0  # both are one formula then
    optimizer.load_state_dict(state)


@pytest.mark.parametrize("decoupled", [True, False])
def test_torch_learns_which_formula_a_state_is_of(decoupled, device):
    value = torch.randn(5, device=device, dtype=torch.float64)
    grads = [torch.randn_like(value) for _ in range(4)]
    param = torch.nn.Parameter(value.clone())
    hyper = {"lr": 0.1, "weight_decay": 0.1}
    ours = run_steps(FusedAdam, [param], [[g] for g in grads[:2]], adam_w_mode=decoupled, **hyper)
    theirs = (torch.optim.AdamW if decoupled else torch.optim.Adam)([param], **hyper)
    theirs.load_state_dict(save_and_load(ours.state_dict()))
    for g in grads[2:]:
        param.grad = g
        theirs.step()
    expected = adam_reference(value, *grads, adam_w_mode=decoupled, **hyper)
    torch.testing.assert_close(param.detach(), expected)


def test_deepcopy_keeps_the_mode(device):
    param = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = FusedAdam([param], lr=0.1, weight_decay=0.5, adam_w_mode=False)
    clone = copy.deepcopy(optimizer)
    assert clone.adam_w_mode == 0
    own = clone.param_groups[0]["params"][0]
    for p, o in ((param, optimizer), (own, clone)):
        p.grad = torch.ones_like(p)
        o.step()
    assert torch.equal(param, own)
