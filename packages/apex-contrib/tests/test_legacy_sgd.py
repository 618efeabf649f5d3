"""Apex's first FusedSGD and FP16_Optimizer against float64 oracles."""

import math

import pytest
import torch

from apex.contrib.optimizers import FP16_Optimizer, FusedAdam, FusedLAMB
from apex.contrib.optimizers.fused_sgd import FusedSGD
from apex.contrib.optimizers.legacy_sgd import masters_sgd_step
from apex_testkit import HALVES, assert_as_accurate_as, opcheck_samples
from apex_testkit.optimizers_lamb import lamb_reference

VARIANTS = {
    "plain": {},
    "momentum": {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "late_decay": {"momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True},
}


def sgd_reference(params, all_grads, momentum=0, dampening=0, weight_decay=0, nesterov=False,
                  wd_after_momentum=False):  # fmt: skip
    params, buffers = list(params), [None] * len(params)
    for grads in all_grads:
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            if g is None:
                continue
            if not wd_after_momentum:
                g = g + weight_decay * p
            u = g
            if momentum:
                first = buffers[i] is None
                buffers[i] = g if first else momentum * buffers[i] + (1 - dampening) * g
                u = g + momentum * buffers[i] if nesterov else buffers[i]
            if wd_after_momentum:
                u = u + weight_decay * p
            params[i] = p - 0.1 * u
    return params


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_sgd_against_float64(dtype, options, device):
    # The last is more than a GPU's block takes.
    start = [torch.randn(n, device=device) for n in ((3, 5), (70,), (0,), (9001,))]
    grads = [[torch.randn_like(p).to(dtype) for p in start] for _ in range(3)]
    grads[0][1] = None  # its first step is the second
    masters, model = [p.clone() for p in start], [p.to(dtype, copy=True) for p in start]
    optimizer = FusedSGD(masters, lr=0.1, **options)
    for own in grads:
        scaled = [None if g is None else g * 8 for g in own]
        optimizer.step(grads=scaled, output_params=model, scale=8.0)
    wide = [[None if g is None else g.float() for g in own] for own in grads]
    assert_as_accurate_as(
        lambda start, wide: sgd_reference(start, wide, **options), masters, start, wide
    )
    assert all(torch.equal(p, m.to(dtype)) for p, m in zip(model, masters, strict=True))
    assert all(bool(optimizer.state[m]) == ("momentum" in options) for m in masters)


def test_sgd_op_passes_opcheck(device):
    params = [torch.randn(n, device=device) for n in (5, 0, 130)]
    grads, copies = ([p.half() for p in params] for _ in "gc")
    flags = (False, False, True, 0.5)
    samples = [
        (params, grads, [], copies, 0.1, 0.0, 0.0, 0.1, *flags),
        (params, grads, [p.clone() for p in params], copies, 0.1, 0.9, 0.0, 0.1, *flags),
    ]
    opcheck_samples(masters_sgd_step, samples)
    for spoiled, message in (
        ([p.half() for p in params], "params must be float32"),
        (params[:2], "has 2 tensors"),
    ):
        with pytest.raises(RuntimeError, match=message):
            masters_sgd_step(spoiled, grads, [], copies, 0.1, 0.0, 0.0, 0.1, *flags)
    with pytest.raises(RuntimeError, match="momentum_buffers must be given if momentum"):
        masters_sgd_step(params, grads, [], copies, 0.1, 0.9, 0.0, 0.1, *flags)


def test_sgd_bad_input(device):
    p = torch.randn(5, device=device)
    for options in (
        {},
        {"lr": -1},
        {"lr": 1, "momentum": -1},
        {"lr": 1, "weight_decay": -1},
        {"lr": 1, "nesterov": True},
        {"lr": 1, "nesterov": True, "momentum": 0.9, "dampening": 0.1},
    ):
        with pytest.raises(ValueError, match="FusedSGD: "):
            FusedSGD([p], **options)
    optimizer = FusedSGD([p], lr=0.1, momentum=0.9)
    momentums, is_first = optimizer.get_momentums([p])
    assert is_first
    assert not momentums[0].any()
    assert optimizer.get_momentums([p]) == (momentums, False)
    with pytest.raises(RuntimeError, match="grads must be given"):
        optimizer.step(output_params=[p])
    with pytest.raises(RuntimeError, match="output_params must be given"):
        optimizer.step(grads=[p])
    with pytest.raises(RuntimeError, match="must be float32 and have an output"):
        optimizer.step(grads=[p], output_params=[None])
    optimizer._amp_stash = object()
    with pytest.raises(RuntimeError, match=r"does not work with apex\.amp"):
        optimizer.step(grads=[p], output_params=[p])


# FP16_Optimizer.

INNER = {
    "adam": lambda params: FusedAdam(params, lr=0.1, eps=1e-3),
    "sgd": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "lamb": lambda params: FusedLAMB(params, lr=0.1, max_grad_norm=0.0),
    "torch": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def adam_reference(params, all_grads):
    results = []
    for i, p in enumerate(params):
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        for step, grads in enumerate(all_grads, start=1):
            m = 0.9 * m + 0.1 * grads[i]
            v = 0.999 * v + 0.001 * grads[i].square()
            rate = 0.1 * math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            p = p - rate * m / (v.sqrt() + 1e-3)
        results.append(p)
    return results


@pytest.mark.parametrize("name", INNER)
def test_masters_against_float64(name, device):
    start = [torch.randn(n, device=device).half() for n in ((3, 5), (70,))]
    weights = [[torch.randn_like(p) for p in start] for _ in range(3)]
    model = [p.clone().requires_grad_() for p in start]
    optimizer = FP16_Optimizer(INNER[name](model), static_loss_scale=64.0)
    for own in weights:  # whose gradients are these
        optimizer.zero_grad()
        optimizer.backward(sum((p * w).sum() for p, w in zip(model, own, strict=True)))
        optimizer.step()

    def plain(start, weights):
        if name == "adam":
            return adam_reference(start, weights)
        if name == "lamb":
            return lamb_reference(start, *weights, lr=0.1, max_grad_norm=0.0)
        return sgd_reference(start, weights, momentum=0.9)

    wide = [p.float() for p in start], [[w.float() for w in own] for own in weights]
    assert_as_accurate_as(plain, optimizer.fp32_groups[0], *wide)
    for param, master in zip(model, optimizer.fp32_groups[0], strict=True):
        assert torch.equal(param, master.half())
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state


def test_dynamic_scale(device, capsys):
    param = torch.ones(3, device=device).half().requires_grad_()
    optimizer = FP16_Optimizer(INNER["adam"]([param]), dynamic_loss_scale=True)
    optimizer.scale_window = 3
    scales = []
    for value in (math.inf, 1e-3, 1e-3, 1e-3, 1e-3, math.nan):
        before = param.detach().clone()
        optimizer.zero_grad(set_grads_to_None=False)
        optimizer.backward((param.float() * value).sum())
        optimizer.step()
        assert optimizer.overflow == (not math.isfinite(value))
        assert torch.equal(before, param) == optimizer.overflow
        scales.append(optimizer.cur_scale)
    assert scales == [2.0**15] * 3 + [2.0**16] * 2 + [2.0**15]
    assert capsys.readouterr().out.count("the step is skipped") == 2

    state = optimizer.state_dict()
    other = FP16_Optimizer(INNER["adam"]([param.detach().clone().requires_grad_()]))
    with torch.no_grad():
        other.fp32_groups[0][0].zero_()
    other.load_state_dict(state)
    assert (other.cur_scale, other.cur_iter, other.last_overflow_iter) == (2.0**15, 6, 5)
    assert torch.equal(other.fp32_groups[0][0], optimizer.fp32_groups[0][0])
    smaller = FP16_Optimizer(INNER["adam"]([torch.ones(2).half().requires_grad_()]))
    with pytest.raises(ValueError, match="fp32_groups have shapes"):
        smaller.load_state_dict(state)


def test_closure_missing_gradients_and_bad_arguments(device):
    param, unused = (torch.ones(3, device=device).half().requires_grad_() for _ in "ab")
    optimizer = FP16_Optimizer(INNER["sgd"]([{"params": [param, unused]}, {"params": [
        torch.ones(2, device=device).requires_grad_()]}]))  # fmt: skip

    def closure():
        optimizer.zero_grad()
        loss = param.sum()
        optimizer.backward(loss)
        return loss

    assert optimizer.step(closure).item() == 3
    assert torch.equal(unused, torch.ones_like(unused))
    assert param[0] < 1
    with pytest.raises(ValueError, match="dynamic_loss_args must be None"):
        FP16_Optimizer(optimizer.optimizer, dynamic_loss_args={"init_scale": 4})
    with pytest.raises(ValueError, match="static_loss_scale must be > 0"):
        FP16_Optimizer(optimizer.optimizer, static_loss_scale=0)
    with pytest.raises(TypeError, match="init_optimizer must be an optimizer, got Linear"):
        FP16_Optimizer(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("name", INNER)
def test_the_older_of_two_over_one_parameter_is_refused(name):
    def step(optimizer):
        optimizer.zero_grad()
        optimizer.backward(model[0].sum() + model[1].sum())
        optimizer.step()

    model = [torch.ones(3).half().requires_grad_() for _ in "ab"]
    old = FP16_Optimizer(INNER[name](model))
    step(old)
    new = FP16_Optimizer(INNER[name](model[1:]))
    step(new)
    before = [(p.detach().clone(), p.grad.clone()) for p in model]
    for use in (lambda: old.backward(model[0].sum()), old.step):
        with pytest.raises(RuntimeError, match="belong to a newer FP16_Optimizer, which was built"):
            use()
    for param, (value, grad) in zip(model, before, strict=True):
        assert torch.equal(param, value)
        assert torch.equal(param.grad, grad)
    step(new)
    assert model[1][0] < before[1][0][0]


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
def test_gradients_of_another_layout(kind, device):
    """They are copied to the parameter's layout; so results are those of contiguous ones."""
    grad = torch.arange(12.0, device=device).view(4, 3)
    found = []
    for given in (grad, grad.t().contiguous().t()):
        master, model = (torch.ones(4, 3, device=device) for _ in range(2))
        optimizer = kind([master], lr=0.1)
        for _ in range(2):
            optimizer.step(grads=[given], output_params=[model])
        found.append((master, model))
    assert not torch.equal(found[0][0], torch.ones_like(grad))
    assert all(map(torch.equal, *found))
