"""Groups of parameters that join later: named ones, and the dict that the caller keeps."""

import copy

import pytest
import torch
from torch import nn

from apex import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
HALVES = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}


def build(level, make, named=False):
    torch.manual_seed(0)
    body, head = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(body, head)
    optimizer = make(body.named_parameters() if named else body.parameters())
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)


def step(model, optimizer):
    with amp.scale_loss(model(torch.ones(2, 4)).float().pow(2).mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_named_parameters(level, make_optimizer):
    model, optimizer = build(level, make_optimizer, named=True)
    optimizer.add_param_group({"params": model[1].named_parameters()})
    assert [g["param_names"] for g in optimizer.param_groups] == [["weight", "bias"]] * 2
    params = optimizer.param_groups[1]["params"]
    expected = torch.float32 if level in ("O2", "O5") else HALVES.get(level, torch.float32)
    assert [p.dtype for p in params] == [expected] * 2
    before = model[1].weight.clone()
    step(model, optimizer)
    assert not torch.equal(before, model[1].weight)
    assert len(optimizer.state_dict()["param_groups"][1]["param_names"]) == 2


@pytest.mark.parametrize("level", LEVELS)
def test_the_group_is_the_callers_own_dict(level, make_optimizer):
    model, optimizer = build(level, make_optimizer)
    group = {"params": model[1].parameters(), "lr": 0.5}
    optimizer.add_param_group(group)
    assert optimizer.param_groups[1] is group
    group["lr"] = 0.0
    before = model[1].weight.clone()
    step(model, optimizer)
    assert torch.equal(before, model[1].weight)


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        (lambda m: [("weight", m.weight), m.bias], ValueError, "with/without names"),
        (lambda m: list(m.parameters()), ValueError, "should be with|with/without names"),
        (lambda m: [("weight", m.weight), ("bias", 3)], TypeError, r"\[1\] is int"),
        (lambda m: [("weight", m.weight, 3)], TypeError, r"\[0\] is tuple"),
    ],
)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_refused_groups_are_as_they_were(level, params, error, text):
    model, optimizer = build(level, lambda p: torch.optim.SGD(p, lr=0.1), named=True)
    group = {"params": params(model[1]), "lr": 0.5}
    before = copy.copy(group)
    with pytest.raises(error, match=text):
        optimizer.add_param_group(group)
    assert group.keys() == before.keys()
    for actual, expected in zip(group["params"], before["params"], strict=True):
        assert actual is expected
    assert len(optimizer.param_groups) == 1
    assert len(list(amp.master_params(optimizer))) == 2
    step(model, optimizer)
