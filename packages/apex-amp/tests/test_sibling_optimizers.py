"""Optimizers of the sibling wheels: what amp and FusedSGD or LARC promise each other.

The classes here have the siblings' interfaces, so that the promise is tested without them.
"""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp import _amp_state

half, bfloat16, single = torch.float16, torch.bfloat16, torch.float32


def network():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def build(level="O2", model=None, make=torch.optim.SGD, **kwargs):
    model = model or network()
    optimizer = make(model.parameters(), lr=0.1)
    options = {"loss_scale": 128.0, **kwargs}
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def backward(model, optimizer, **kwargs):
    loss = F.mse_loss(model(torch.ones(4, 8) + torch.arange(4.0)[:, None]), torch.ones(4, 2))
    with amp.scale_loss(loss, optimizer, **kwargs) as scaled_loss:
        scaled_loss.backward()


class LARC:
    """The interface of apex.parallel's wrapper, which is no torch optimizer."""

    def __init__(self, optim):
        self.optim = optim
        for name in (
            "state",
            "state_dict",
            "load_state_dict",
            "zero_grad",
            "add_param_group",
            "step",
        ):
            setattr(self, name, getattr(optim, name))

    param_groups = property(lambda self: self.optim.param_groups)


def test_larc(monkeypatch):
    module = types.ModuleType("apex.parallel.LARC")
    module.LARC = LARC
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    model = network()
    model, optimizer = build(
        model=model, make=lambda params, lr: LARC(torch.optim.SGD(params, lr=lr))
    )
    backward(model, optimizer)
    before = model[0].weight.clone()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)
    assert {p.dtype for p in optimizer.optim.param_groups[0]["params"]} == {single}


class FusedSGD(torch.optim.SGD):
    """The protocol between amp and an optimizer that unscales gradients itself, in plain torch."""

    def __init__(self, params, lr, materialize_master_grads):
        super().__init__(params, lr)
        self.most_recent_scale, self.scale_set_by_backward = 1.0, False
        self.materialize_master_grads = materialize_master_grads

    @torch.no_grad()
    def step(self, closure=None):
        stash, lr = self._amp_stash, self.param_groups[0]["lr"]
        for param, master in zip(
            stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True
        ):
            grad = master.grad if self.materialize_master_grads else param.grad
            master -= lr / self.most_recent_scale * grad.float()
            param.copy_(master)
        for param in stash.all_fp32_from_fp32_params:
            param -= lr / self.most_recent_scale * param.grad
        self.most_recent_scale, self.scale_set_by_backward = 1.0, False


@pytest.mark.parametrize("scales", [[64.0], [64.0, 16.0], [16.0, 64.0], [4.0, 64.0, 16.0]])
@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_fused_sgd(level, materialize, scales):
    """Passes at different scales, in which only some parameters take part."""

    def train(make):
        torch.manual_seed(0)
        model, optimizer = build(level, make=make, loss_scale="dynamic")
        for i, scale in enumerate(scales):
            _amp_state.loss_scalers[0]._loss_scale = scale
            if i == 0 and len(scales) == 3:
                loss = model[0].weight.float().sum() + model[1].weight.sum()
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                backward(model, optimizer)
        if make is fused and not materialize:
            assert optimizer.most_recent_scale == min(scales)
            assert optimizer.scale_set_by_backward
            assert all(p.grad is None for p in optimizer._amp_stash.all_fp32_from_fp16_params)
        optimizer.step()
        return [p.detach() for p in amp.master_params(optimizer)], list(model.parameters())

    fused = lambda params, lr: FusedSGD(params, lr, materialize)
    expected, model_expected = train(torch.optim.SGD)
    actual, model_actual = train(fused)
    for a, e in zip((*actual, *model_actual), (*expected, *model_expected), strict=True):
        # Sums of 16-bit gradients are rounded where masters' gradients are not materialized.
        torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-3 if level == "O2" else 1e-2)


@pytest.mark.parametrize("materialize", [True, False])
def test_fused_sgd_skips(materialize):
    make = lambda params, lr: FusedSGD(params, lr, materialize)
    model, optimizer = build(make=make, loss_scale="dynamic")
    before = [p.detach().clone() for p in model.parameters()]
    assert optimizer._amp_stash.has_masters
    model[0].weight.register_hook(lambda grad: grad * float("inf"))
    backward(model, optimizer)
    optimizer.step()
    assert (optimizer.most_recent_scale, optimizer.scale_set_by_backward) == (1.0, False)
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)
