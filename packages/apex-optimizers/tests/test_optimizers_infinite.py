"""Infinite parameters in steps without decay, and LAMB's clipping by a norm that is not finite."""

import functools
import itertools

import pytest
import torch

from apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from apex_testkit.optimizers import run_steps
from apex_testkit.optimizers_lamb import lamb_reference

INF, NAN = float("inf"), float("nan")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
WITHOUT_DECAY = {
    "adamw": (FusedAdam, {}, torch.float32),
    "adam": (FusedAdam, {"adam_w_mode": False}, torch.float32),
    "adam_capturable": (FusedAdam, {"capturable": True}, torch.float32),
    "adam_bf16": (FusedAdam, {}, BF16),
    "adam_masters": (FusedAdam, {"master_weights": True}, BF16),
    "adam_remainders": (FusedAdam, {"master_weights": True, "store_param_remainders": True}, BF16),
    "adam_fp8": (FusedAdam, {"exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP8}, BF16),
    "adam_fp8_l2": (
        FusedAdam,
        {"exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP8, "adam_w_mode": False},
        BF16,
    ),
    "sgd": (FusedSGD, {}, torch.float32),
    "sgd_momentum": (FusedSGD, {"momentum": 0.9}, torch.float32),
    "sgd_late": (FusedSGD, {"momentum": 0.9, "wd_after_momentum": True}, torch.float32),
    "adagrad": (FusedAdagrad, {}, torch.float32),
    "adagrad_w": (FusedAdagrad, {"adagrad_w_mode": True}, torch.float32),
    "novograd": (FusedNovoGrad, {}, torch.float32),
    "novograd_inside": (FusedNovoGrad, {"reg_inside_moment": True}, torch.float32),
    "lars": (FusedLARS, {}, torch.float32),
    "lars_momentum": (FusedLARS, {"momentum": 0.9}, torch.float32),
    "lamb": (FusedLAMB, {}, torch.float32),
    "lamb_l2": (FusedLAMB, {"adam_w_mode": False}, torch.float32),
    "nvlamb": (FusedLAMB, {"use_nvlamb": True}, torch.float32),
    "lamb_bf16": (FusedLAMB, {}, BF16),
    "lamb_masters": (FusedMixedPrecisionLamb, {"reduced_precision_dtype": BF16}, BF16),
    "nvlamb_masters": (
        FusedMixedPrecisionLamb,
        {"reduced_precision_dtype": BF16, "use_nvlamb": True},
        BF16,
    ),
}


@pytest.mark.parametrize("name", WITHOUT_DECAY)
def test_an_infinite_parameter_stays_without_decay(name, device):
    cls, options, dtype = WITHOUT_DECAY[name]
    param = torch.nn.Parameter(torch.tensor([-INF, 1.0, INF], dtype=dtype, device=device))
    grad = torch.tensor([0.0, 1.0, 0.5], dtype=dtype, device=device)
    run_steps(cls, [param], [[grad], [grad]], lr=0.125, weight_decay=0.0, **options)
    assert param[::2].tolist() == [-INF, INF]
    assert 0.25 < param[1] < 1


@pytest.mark.parametrize("cls", [FusedLAMB, FusedLARS])
def test_an_infinite_norm_gives_no_learning_rate(cls, device):
    """Other elements of the tensor take the step of a tensor whose ratio of norms is 1."""
    options = {"eps": 0.0, "use_nvlamb": True, "max_grad_norm": 0.0} if cls is FusedLAMB else {}
    param = torch.nn.Parameter(torch.tensor([INF, 1.0, -8.0], device=device))
    grad = torch.tensor([0.0, 1.0, -1.0], device=device)
    run_steps(cls, [param], [[grad]], lr=0.25, weight_decay=0.5, **options)
    decay = 0.25 * 0.5 * torch.tensor([1.0, -8.0])
    expected = torch.tensor([1.0, -8.0]) - 0.25 * torch.tensor([1.0, -1.0]) - decay
    torch.testing.assert_close(param[1:].detach().cpu(), expected)
    assert param[0].isnan()  # inf less its own decay, as in torch.optim


VALUES = [INF, -INF, NAN, 0.0, -0.0, 1.0]
PAIRS = list(itertools.product(VALUES, VALUES))
LOOP, FUSED = {"foreach": False}, {"fused": True}
ADAM = functools.partial(FusedAdam, adam_w_mode=False)
TORCH = {
    "adamw_fused": (FusedAdam, torch.optim.AdamW, FUSED, ["betas", "eps"]),
    "adamw": (FusedAdam, torch.optim.AdamW, LOOP, ["betas", "eps"]),
    "adam_fused": (ADAM, torch.optim.Adam, FUSED, ["betas", "eps"]),
    "adam": (ADAM, torch.optim.Adam, LOOP, ["betas", "eps"]),
    "sgd_fused": (FusedSGD, torch.optim.SGD, FUSED, ["momentum"]),
    "sgd": (FusedSGD, torch.optim.SGD, LOOP, ["momentum"]),
    "adagrad": (FusedAdagrad, torch.optim.Adagrad, LOOP, ["eps"]),
}
CHOICES = {"betas": [(0.9, 0.99), (0.0, 0.0)], "eps": [0.0, 1e-8], "momentum": [0.0, 0.5]}


@pytest.mark.parametrize("name", TORCH)
def test_special_values_are_those_of_torch(name, device):
    """Every pair of parameter and gradient, with every number that may be 0."""
    fused, plain, form, own = TORCH[name]
    grid = {"lr": [0.0, 0.25], "weight_decay": [0.0, 0.25], "maximize": [False, True]}
    grid |= {key: CHOICES[key] for key in own}
    for chosen in itertools.product(*grid.values()):
        hyper = dict(zip(grid, chosen, strict=True))
        results = []
        for cls in (fused, functools.partial(plain, **form)):
            param = torch.nn.Parameter(torch.tensor([p for p, _ in PAIRS], device=device))
            grad = torch.tensor([g for _, g in PAIRS], device=device)
            run_steps(cls, [param], [[grad], [torch.ones_like(grad)]], **hyper)
            results.append(param.detach())
        if name.startswith("adamw") and hyper["weight_decay"]:
            # torch multiplies by 1 - lr * weight_decay, which keeps inf; Apex subtracts the decay.
            results = [t[[p not in (INF, -INF) for p, _ in PAIRS]] for t in results]
        torch.testing.assert_close(
            *results, equal_nan=True, msg=lambda text, h=hyper: f"{h} {text}"
        )


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("cls", [FusedLAMB, FusedMixedPrecisionLamb])
def test_clipping_by_a_norm_that_is_not_finite_is_that_of_torch(cls, dtype, bad, device):
    """inf: finite gradients count as 0. nan: all parameters become nan."""
    values = [torch.tensor([2.0, -1.0]).to(dtype), torch.tensor([0.5]).to(dtype)]
    good = [torch.tensor([1.0, 2.0]).to(dtype), torch.tensor([4.0]).to(dtype)]
    worse = [torch.tensor([bad, 2.0]).to(dtype), torch.tensor([4.0]).to(dtype)]
    params = [torch.nn.Parameter(v.clone().to(device)) for v in values]
    steps = [[g.to(device) for g in grads] for grads in (good, worse)]
    run_steps(cls, params, steps, lr=0.125, max_grad_norm=1.0)

    clipped = []
    for grads in (good, worse):
        own = [torch.nn.Parameter(torch.zeros_like(g, dtype=torch.float64)) for g in grads]
        for p, g in zip(own, grads, strict=True):
            p.grad = g.double()
        torch.nn.utils.clip_grad_norm_(own, 1.0)
        clipped.append([p.grad for p in own])
    expected = lamb_reference([v.double() for v in values], *clipped, lr=0.125, max_grad_norm=0.0)
    for actual, target in zip(params, expected, strict=True):
        torch.testing.assert_close(
            actual.detach().cpu().double(), target, rtol=2e-2, atol=1e-2, equal_nan=True
        )
    assert params[0].isnan().all()  # through the norm of the update, or its own gradient
    assert params[1].isnan().all() == (bad != INF)


@pytest.mark.parametrize(("cls", "steps"), [(FusedLARS, 1), (FusedNovoGrad, 2)])
def test_an_infinite_gradient_stops_its_tensor_and_nan_fills_it(cls, steps, device):
    for bad, is_kept in ((INF, True), (NAN, False)):
        param = torch.nn.Parameter(torch.tensor([3.0, 4.0], device=device))
        grad = torch.tensor([bad, 1.0], device=device)
        run_steps(cls, [param], [[grad]] * steps, lr=0.125)
        assert param[0].isnan()
        assert (param[1] == 4.0) if is_kept else param[1].isnan()


@pytest.mark.parametrize("limit", [0.0, INF])
def test_a_limit_of_zero_or_infinity_never_clips(limit, device):
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    grads = [torch.full((3,), NAN, device=device), torch.ones(3, device=device)]
    run_steps(FusedLAMB, params, [grads], lr=0.125, max_grad_norm=limit)
    assert params[0].isnan().all()
    assert params[1].isfinite().all()
