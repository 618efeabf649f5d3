"""FP16_Optimizer: the same training as on float32 copies kept by hand, and its whole interface."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex.amp.scaler import LossScaler
from apex.fp16_utils import FP16_Optimizer, convert_network

half, bfloat16, single = torch.float16, torch.bfloat16, torch.float32
INF = float("inf")
MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


def network(device="cpu", dtype=half):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(device)
    return convert_network(model, dtype)


def build(model=None, make="sgd", **kwargs):
    model = model or network()
    return model, FP16_Optimizer(MAKERS[make](model.parameters()), verbose=False, **kwargs)


def loss_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = model[0].weight
    x = torch.randn(16, 8, generator=generator).to(weight)
    y = model[2](model[1](model[0](x).float()).to(weight.dtype))
    return F.mse_loss(y.float(), torch.ones_like(y, dtype=single))


def poison(param):
    def hook(grad):
        handle.remove()
        return grad * INF

    handle = param.register_hook(hook)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", [half, bfloat16], ids=str)
@pytest.mark.parametrize(
    "scaling", [{}, {"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}]
)
def test_trains_as_with_copies_kept_by_hand(scaling, dtype, make, device):
    model, optimizer = build(network(device, dtype), make, **scaling)
    twin = copy.deepcopy(model)
    copies = [nn.Parameter(p.detach().float()) for p in twin.parameters()]
    reference = MAKERS[make](copies)
    for i in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, i)
        optimizer.backward(loss)
        optimizer.step()
        # The scale is a power of two, so that the twin's gradients round alike.
        scale = optimizer.loss_scale
        grads = torch.autograd.grad(loss_of(twin, i) * scale, list(twin.parameters()))
        for param, grad in zip(copies, grads, strict=True):
            param.grad = grad.float() / scale
        reference.step()
        with torch.no_grad():
            for param, value in zip(twin.parameters(), copies, strict=True):
                param.copy_(value)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    for a, b in zip(masters, copies, strict=True):
        assert torch.equal(a, b)


def test_groups_and_attributes():
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": [*model[1:].parameters()], "lr": 0.5}]
    inner = torch.optim.SGD(groups, lr=0.1)
    optimizer = FP16_Optimizer(inner, static_loss_scale=4.0, verbose=False)
    assert optimizer.optimizer is inner
    assert [len(g) for g in optimizer.fp16_groups] == [2, 2]
    assert [len(g) for g in optimizer.fp32_from_fp16_groups] == [2, 2]
    assert optimizer.fp32_from_fp32_groups == [[], [*model[1].parameters()]]
    assert optimizer.all_fp16_params == [*model[0].parameters(), *model[2].parameters()]
    assert {p.dtype for p in optimizer.all_fp32_from_fp16_params} == {single}
    assert optimizer.all_fp32_from_fp32_params == [*model[1].parameters()]
    assert optimizer.param_groups is inner.param_groups
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.5]
    assert optimizer.state is inner.state
    assert isinstance(optimizer.loss_scaler, LossScaler)
    assert (optimizer.loss_scale, optimizer.dynamic_loss_scale) == (4.0, False)
    assert (optimizer.overflow, optimizer.first_closure_call_this_step) == (False, True)
    optimizer.loss_scale = "16"
    assert optimizer.loss_scale == 16.0
    optimizer.param_groups = groups = list(optimizer.param_groups)
    assert inner.param_groups is groups
    optimizer.state = state = {}
    assert inner.state is state


def test_state_moves_to_the_masters_in_float32():
    model = network()
    inner = MAKERS["adam"](model.parameters())
    loss_of(model).backward()
    inner.step()
    before = [inner.state[p]["exp_avg"].clone() for p in model.parameters()]
    FP16_Optimizer(inner, verbose=False)
    assert all(p.grad is None for p in model.parameters())
    for param, value in zip(inner.param_groups[0]["params"], before, strict=True):
        assert param.dtype is single
        assert inner.state[param]["exp_avg"].dtype is single
        assert torch.equal(inner.state[param]["exp_avg"], value.float())
    assert len(inner.state) == 6


def test_frozen_parameters_are_left_alone():
    model = network()
    model[0].requires_grad_(False)
    model, optimizer = build(model)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert len(optimizer.all_fp16_params) == 2
    optimizer.backward(loss_of(model))
    optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    model, optimizer = build()
    optimizer.backward(loss_of(model))
    optimizer.zero_grad(set_grads_to_None=set_to_none)
    for param in (*model.parameters(), *optimizer.all_fp32_from_fp16_params):
        assert (param.grad is None) if set_to_none else (param.grad.abs().sum() == 0)


def masters_grads(scales, updates, **kwargs):
    """Gradients after one pass at each loss scale."""
    model, optimizer = build(**kwargs)
    model.eval()
    for i, (scale, update) in enumerate(zip(scales, updates, strict=True)):
        optimizer.loss_scale = scale
        optimizer.backward(loss_of(model, i), update_master_grads=update)
    if not updates[-1]:
        optimizer.update_master_grads()
    return [g for group in optimizer.inspect_master_grad_data() for g in group]


@pytest.mark.parametrize("updates", [[True] * 3, [False, False, True], [False] * 3], ids=str)
@pytest.mark.parametrize("scales", [[64.0] * 3, [64.0, 16.0, 256.0]], ids=str)
def test_passes_add_up_at_any_scale(scales, updates):
    expected = masters_grads([64.0] * 3, [False, False, True], static_loss_scale=64.0)
    actual = masters_grads(scales, updates, static_loss_scale=64.0)
    for a, e in zip(actual, expected, strict=True):
        # A sum of 16-bit gradients is rounded the same at every power of two.
        torch.testing.assert_close(a, e, rtol=2e-3, atol=2e-5)


def test_updating_again_changes_nothing():
    """Gradients are divided by the scale of their backward pass, once."""
    model, optimizer = build(static_loss_scale=64.0)
    optimizer.backward(loss_of(model), update_master_grads=False)
    optimizer.loss_scale = 2.0
    optimizer.update_master_grads()
    (before,) = copy.deepcopy(optimizer.inspect_master_grad_data())
    optimizer.update_master_grads()
    (after,) = optimizer.inspect_master_grad_data()
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    model, optimizer = build(static_loss_scale=64.0)
    optimizer.backward(loss_of(model))
    (expected,) = optimizer.inspect_master_grad_data()
    assert all(torch.equal(a, b) for a, b in zip(after, expected, strict=True))


def test_clipping_and_inspection(capsys):
    model, optimizer = build(static_loss_scale=128.0)
    optimizer.backward(loss_of(model))
    (before,) = optimizer.inspect_master_grad_data()
    assert {g.dtype for g in before} == {single}
    total = torch.stack([g.norm() for g in before]).norm()
    before = [g.clone() for g in before]
    assert optimizer.clip_master_grads(total / 2).item() == pytest.approx(total.item(), rel=1e-6)
    (after,) = optimizer.inspect_master_grad_data()
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b / 2, rtol=1e-5, atol=0.0)
    largest = max(g.abs().max() for g in after)
    assert optimizer.clip_master_grads(1e9, norm_type=INF) == largest
    optimizer.zero_grad(set_grads_to_None=True)
    assert optimizer.inspect_master_grad_data() == [[None] * 6]
    optimizer.overflow = True
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    assert "overflow" in capsys.readouterr().out


@pytest.mark.parametrize("which", [0, 1], ids=["16-bit", "float32"])
def test_an_overflow_skips_one_step(which, capsys):
    model, optimizer = build(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 1024.0})
    optimizer.verbose = True
    before = [
        p.detach().clone() for p in (*model.parameters(), *optimizer.all_fp32_from_fp16_params)
    ]
    poison(model[which].weight)
    optimizer.backward(loss_of(model))
    assert optimizer.overflow
    assert optimizer.step() is None
    assert "loss scale is now 512.0" in capsys.readouterr().out
    assert optimizer.loss_scale == 512.0
    for a, b in zip(
        (*model.parameters(), *optimizer.all_fp32_from_fp16_params), before, strict=True
    ):
        assert torch.equal(a, b)
    assert not optimizer.state
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    optimizer.step()
    assert not optimizer.overflow
    assert not torch.equal(model[0].weight, before[0])


def test_step_with_a_closure_is_lbfgs_on_the_masters():
    """Each evaluation sees the masters' present values."""
    model = network(dtype=bfloat16)
    optimizer = FP16_Optimizer(
        torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3), verbose=False
    )
    seen = []

    def closure():
        for param, master in zip(
            optimizer.all_fp16_params, optimizer.all_fp32_from_fp16_params, strict=True
        ):
            assert torch.equal(param, master.to(bfloat16))
        optimizer.zero_grad()
        loss = loss_of(model)
        optimizer.backward(loss)
        seen.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == seen[0]
    assert len(seen) == 3
    assert seen[-1] < seen[0]
    assert optimizer.first_closure_call_this_step


def test_a_closure_is_repeated_while_it_overflows():
    model, optimizer = build(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 1024.0})
    calls = []

    def closure():
        optimizer.zero_grad()
        if len(calls) < 2:
            poison(model[0].weight)
        loss = loss_of(model)
        optimizer.backward(loss)
        calls.append(optimizer.overflow)
        return loss

    before = model[0].weight.detach().clone()
    optimizer.step(closure)
    assert calls == [True, True, False]
    assert optimizer.loss_scale == 256.0
    assert not torch.equal(model[0].weight, before)


def test_a_closure_that_never_ends_is_an_error():
    for arguments in ({}, {"min_loss_scale": 32.0}):
        model, optimizer = build(dynamic_loss_scale=True, dynamic_loss_args=arguments)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            optimizer.backward(loss_of(model) * float("nan"))

        with pytest.raises(RuntimeError, match="every loss scale"):
            optimizer.step(closure)
        assert optimizer.first_closure_call_this_step


def test_sparse_gradients():
    model = nn.ModuleList(
        [nn.Embedding(5, 2, sparse=True), nn.Embedding(5, 2, sparse=True).bfloat16()]
    )
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = FP16_Optimizer(inner, static_loss_scale=8.0, verbose=False)
    before = [p.detach().clone() for p in model.parameters()]
    for update in (True, True):
        loss = sum(m(torch.tensor([1, 1, 2])).float().sum() for m in model)
        optimizer.backward(loss, update_master_grads=update)
    optimizer.step()
    expected = torch.tensor([0.0, 4.0, 2.0, 0.0, 0.0])[:, None].expand(5, 2)
    for param, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(old.float() - param.float(), expected, rtol=0, atol=4e-2)
