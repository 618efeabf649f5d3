"""FusedAdamSWA's steps with the tensors of the step before, and with others."""

import copy
from itertools import chain

import pytest
import torch

from apex.contrib.openfold_triton.fused_adam_swa import FusedAdamSWA


def make_lists(device, shapes=((3, 5), (), (0,), (70,))):
    params = [torch.randn(shape, device=device) for shape in shapes]
    computes = [p.to(torch.bfloat16, copy=True).requires_grad_() for p in params]
    return params, computes, [torch.empty_like(p) for p in params]


def make_grads(lists):
    return [torch.randn_like(c).detach() for c in lists[1]]


def train(optimizer, computes, all_grads):
    for grads in all_grads:
        for compute, grad in zip(computes, grads, strict=True):
            compute.grad = None if grad is None else grad.clone()
        optimizer.step()


def test_what_was_stepped_before_is_launched_as_it_is(device, monkeypatch):
    """Without the checks in Python, which a step after any change makes again."""
    lists = make_lists(device)
    twins = copy.deepcopy(lists)
    optimizer, checked = FusedAdamSWA(*lists, 0.9), FusedAdamSWA(*twins, 0.9)
    calls = []
    collect = FusedAdamSWA._collect
    monkeypatch.setattr(FusedAdamSWA, "_collect", lambda o: calls.append(o) or collect(o))

    def both(grads):
        checked._held = None
        calls.clear()
        train(optimizer, lists[1], [grads])
        train(checked, twins[1], [grads])
        assert all(map(torch.equal, chain(*lists), chain(*twins)))
        assert [optimizer.state[p]["step"] for p in lists[0]] == [
            checked.state[p]["step"] for p in twins[0]
        ]
        return optimizer in calls

    grads = make_grads(lists)
    assert [both(grads) for _ in range(3)] == [True, False, False]
    assert [both([None, *grads[1:]]), both(grads)] == [True, True]  # steps differ from here
    assert both(grads)


@pytest.mark.parametrize("change", ["average", "shape", "state", "moment", "list", "layout"])
def test_changes_between_steps_are_seen(change, device):
    lists = make_lists(device, shapes=[(4, 6), (4, 6)])
    optimizer = FusedAdamSWA(*lists, 0.9)
    grads = make_grads(lists)
    train(optimizer, lists[1], [grads] * 3)
    before = [t.clone() for own in lists[:2] for t in own]
    if change == "average":
        lists[2][1].data = lists[2][1].data.double()
    elif change == "shape":
        lists[2][1].data = lists[2][1].data.view(6, 4)
    elif change == "state":
        optimizer.state[lists[0][1]] = dict(optimizer.state[lists[0][1]], exp_avg=torch.ones(3))
    elif change == "moment":
        optimizer.state[lists[0][1]]["exp_avg"] = torch.ones(3, device=device)
    elif change == "list":
        optimizer.swa_param_groups[0]["params"][1] = torch.ones(3, device=device)
    else:
        lists[0][1].data = lists[0][1].data.t()
    with pytest.raises(RuntimeError, match=r"FusedAdamSWA.step: the tensors of index 1 must have"):
        train(optimizer, lists[1], [grads])
    after = [t for own in lists[:2] for t in own]
    if change != "layout":
        assert all(map(torch.equal, before, after))
