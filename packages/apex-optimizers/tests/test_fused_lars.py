"""FusedLARS against its formula in float64, over dtypes and options; amp's master weights."""

import functools

import pytest
import torch

from apex.optimizers import FusedLARS
from apex_testkit import FLOATS, HALVES, LARGE, assert_as_accurate_as
from apex_testkit.amp_masters import check_masters_and_copies
from apex_testkit.optimizers import run_steps
from apex_testkit.optimizers_lars import lars_reference

SIZES = {
    "one": [1],
    "odd": [1, 7, 1023],
    "empty": [0, 5, 0],
    "scalar": [()],
    "many": [3] * 200,
    "large": LARGE,
}
OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "eps": {"momentum": 0.9, "eps": 5.0},
    "trust": {"momentum": 0.9, "trust_coefficient": 0.5},
    "maximize": {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_follows_the_formula(dtype, options, device):
    hyper = {"lr": 0.3, "trust_coefficient": 0.1, **options}
    for sizes in SIZES.values():
        values = [torch.randn(n, device=device, dtype=dtype) for n in sizes]
        grads = [[torch.randn_like(v) for v in values] for _ in range(10)]
        params = [torch.nn.Parameter(v.clone()) for v in values]
        run_steps(FusedLARS, params, grads, **hyper)
        for i, (p, v) in enumerate(zip(params, values, strict=True)):
            own = [g[i] for g in grads]
            # The parameter is rounded once in each of ten steps, at first at its first size.
            scale = v.abs().max().item() if v.numel() else 0.0
            formula = functools.partial(lars_reference, **hyper)
            assert_as_accurate_as(formula, p.detach(), v, *own, ulps=10, scale=scale)


def test_groups_have_their_own_numbers(device):
    """eps, trust and is_skipped of a group count, not those of the constructor."""
    values = [torch.randn(9, device=device) for _ in range(4)]
    grads = [[torch.randn(9, device=device) for _ in range(4)] for _ in range(2)]
    own = [{"eps": 3.0}, {"trust_coefficient": 0.5}, {"is_skipped": True}, {"lr": 1.5}]
    params = [torch.nn.Parameter(v.clone()) for v in values]
    groups = [{"params": [p], **o} for p, o in zip(params, own, strict=True)]
    hyper = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "eps": 1.0}
    optimizer = run_steps(
        lambda params, **hyper: FusedLARS(groups, **hyper), params, grads, **hyper
    )
    for i, (p, v, o) in enumerate(zip(params, values, own, strict=True)):
        seen = [g[i] for g in grads]
        assert_as_accurate_as(
            functools.partial(lars_reference, **{**hyper, **o}), p.detach(), v, *seen, ulps=2
        )
    assert [g["is_skipped"] for g in optimizer.param_groups] == [False, False, True, False]


def test_zero_norms_take_the_plain_learning_rate(device):
    zero, one = torch.zeros(5, device=device), torch.ones(5, device=device)
    params = [torch.nn.Parameter(v.clone()) for v in (zero, one, one)]
    run_steps(FusedLARS, params, [[one, zero, one]], lr=0.5, weight_decay=0.5, momentum=0.9)
    assert params[0].eq(-0.5).all()
    assert params[1].eq(0.75).all()  # lr * weight_decay is taken off
    torch.testing.assert_close(params[2].detach(), one - 0.5 * 0.001 / 1.5 * 1.5)


def test_small_updates_collect_in_the_buffer(device):
    """lr and trust are in the buffer: in float16 it would be subnormal or zero."""
    param = torch.nn.Parameter(torch.ones(65, device=device).half())
    optimizer = FusedLARS([param], lr=1e-4, momentum=0.9)
    param.grad = torch.randn_like(param)
    optimizer.step()
    buffer = optimizer.state[param]["momentum_buffer"]
    assert buffer.dtype == torch.float32
    update = 1e-4 * 1e-3 * 65**0.5 / param.grad.float().norm() * param.grad.float()
    torch.testing.assert_close(buffer, -update, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        FusedLARS([param], lr=1.0).get_momentums([param])[0][0], torch.zeros_like(buffer)
    )


def test_options_without_effect_have_none(device):
    value = torch.randn(9, device=device)
    grads = [[torch.randn_like(value)] for _ in range(3)]
    results = []
    for options in ({}, {"dampening": 0.5}, {"wd_after_momentum": True}):
        param = torch.nn.Parameter(value.clone())
        run_steps(FusedLARS, [param], grads, lr=1.0, momentum=0.9, weight_decay=0.1, **options)
        results.append(param.detach())
    assert all(torch.equal(r, results[0]) for r in results)


def test_no_buffers_without_momentum(device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = run_steps(FusedLARS, [param], [[torch.ones_like(param)]], lr=0.1)
    assert not optimizer.state_dict()["state"]


def test_inf_and_nan_reach_their_tensor_alone(device):
    params = [torch.nn.Parameter(torch.ones(130, device=device)) for _ in range(3)]
    grads = [torch.ones(130, device=device) for _ in range(3)]
    grads[0][64], grads[1][129] = float("nan"), float("inf")
    run_steps(FusedLARS, params, [grads], lr=1.0, momentum=0.9)
    assert params[0].isnan().all()
    assert params[1][129].isnan()  # 1 / inf * inf
    assert params[2].isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "lr must be given"),
        ({"lr": -1.0}, "lr must be >= 0, got -1.0"),
        ({"lr": 0.1, "momentum": -0.5}, "momentum must be >= 0, got -0.5"),
        ({"lr": 0.1, "eps": -1.0}, "eps must be >= 0"),
        ({"lr": 0.1, "trust_coefficient": float("nan")}, "trust_coefficient must be >= 0, got nan"),
        ({"lr": 0.1, "nesterov": True}, "nesterov=True needs momentum > 0"),
    ],
)
def test_bad_hyper_parameters(options, message):
    with pytest.raises(ValueError, match="FusedLARS: " + message):
        FusedLARS([torch.nn.Parameter(torch.ones(1))], **options)


HYPER = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.1, "eps": 0.1}


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("dtype", [*HALVES, None], ids=str)
def test_masters_and_copies_follow_the_formula(dtype, materialize, device):
    """The norm is that of the unscaled gradient, else eps would count less."""
    check_masters_and_copies(FusedLARS, lars_reference, HYPER, dtype, materialize, device)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_scale_without_masters(momentum, device):
    value = torch.randn(33, device=device)
    grads = [torch.randn(33, device=device) for _ in range(2)]
    hyper = {**HYPER, "momentum": momentum}
    param = torch.nn.Parameter(value.clone())
    optimizer = FusedLARS([param], **hyper)
    for grad in grads:
        param.grad, optimizer.most_recent_scale = grad * 128, 128.0
        optimizer.step()
    assert_as_accurate_as(
        lambda p, *g: lars_reference(p, *g, **hyper), param.detach(), value, *grads, ulps=2
    )
