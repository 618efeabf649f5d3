"""FP16_Optimizer over parameters that were frozen when it was made, and are not later."""

import copy

import pytest
import torch
from torch import nn

from apex.fp16_utils import FP16_Optimizer

half, bfloat16 = torch.float16, torch.bfloat16
MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


def build(dtype, make, frozen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model[0].to(dtype)
    model[2].to(dtype)
    for layer in frozen:
        model[layer].requires_grad_(False)
    inner = MAKERS[make](model.parameters())
    return model, FP16_Optimizer(inner, static_loss_scale=128.0, verbose=False)


def train(model, optimizer, steps=2):
    dtype = model[0].weight.dtype
    for i in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i)).to(dtype)
        optimizer.zero_grad()
        optimizer.backward(
            model[2](model[1](model[0](x).float()).to(dtype)).float().square().mean()
        )
        optimizer.step()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", [half, bfloat16], ids=str)
@pytest.mark.parametrize("layer", [0, 1])
def test_trains_as_if_never_frozen(layer, dtype, make):
    expected, optimizer = build(dtype, make, ())
    train(expected, optimizer)
    (expected_masters,) = optimizer.state_dict()["fp32_from_fp16"]

    model, optimizer = build(dtype, make, (layer,))
    model.requires_grad_(True)
    train(model, optimizer)
    for actual, value in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(actual, value)
    assert optimizer.all_fp16_params == [*model[0].parameters(), *model[2].parameters()]
    # In the same order, so that a process in which it never was frozen can load it.
    (masters,) = optimizer.state_dict()["fp32_from_fp16"]
    for actual, value in zip(masters, expected_masters, strict=True):
        assert torch.equal(actual, value)


@pytest.mark.parametrize("make", MAKERS)
def test_trained_frozen_and_unfrozen_again(make):
    model, optimizer = build(bfloat16, make, (0,))
    train(model, optimizer)
    before = model[0].weight.detach().clone()
    model[2].requires_grad_(False)
    model[0].requires_grad_(True)
    train(model, optimizer)
    assert not torch.equal(model[0].weight, before)
    assert [len(group) for group in optimizer.fp16_groups] == [4]
    assert {m.dtype for m in optimizer.all_fp32_from_fp16_params} == {torch.float32}


@pytest.mark.parametrize("make", MAKERS)
def test_checkpoint_of_after(make):
    """Unfrozen before the checkpoint is loaded, and trained on: bit for bit the same."""
    model, optimizer = build(half, make, (0,))
    model.requires_grad_(True)
    train(model, optimizer)
    state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer)
    twin, optimizer = build(half, make, (0,))
    twin.requires_grad_(True)
    twin.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(twin, optimizer)
    for actual, value in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(actual, value)
