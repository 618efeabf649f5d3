"""FusedSGD against its formula in float64 and torch.optim.SGD, over dtypes, sizes and options."""

import copy

import pytest
import torch

from apex.optimizers.fused_sgd import FusedSGD
from apex_testkit import FLOATS, LARGE, assert_as_accurate_as
from apex_testkit.grids import LAYOUTS, channels_last
from apex_testkit.optimizers import run_steps, sgd_reference

SIZES = {
    "one": [1],
    "odd": [1, 7, 1023],
    "empty": [0, 5],
    "scalar": [()],
    "many": [3] * 200,
    "large": LARGE,
}
OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "dampening": {"momentum": 0.5, "dampening": 0.3},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "late_decay": {"momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True},
    "late_decay_nesterov": {
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 0.1,
        "wd_after_momentum": True,
    },
    "late_decay_alone": {"weight_decay": 0.1, "wd_after_momentum": True},
    "maximize": {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_follows_the_formula(dtype, options, device):
    for sizes in SIZES.values():
        values = [torch.randn(n, device=device, dtype=dtype) for n in sizes]
        grads = [[torch.randn_like(v) for v in values] for _ in range(3)]
        params = [torch.nn.Parameter(v.clone()) for v in values]
        run_steps(FusedSGD, params, grads, lr=1e-2, **options)
        for i, (p, v) in enumerate(zip(params, values, strict=True)):
            own = [g[i] for g in grads]
            # The parameter is rounded once in each of three steps.
            assert_as_accurate_as(
                lambda p, *g: sgd_reference(p, *g, lr=1e-2, **options), p.detach(), v, *own, ulps=3
            )


@pytest.mark.parametrize("options", [o for k, o in OPTIONS.items() if "late" not in k], ids=str)
def test_hundred_steps_match_torch_sgd(options, device):
    model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.GELU(), torch.nn.Linear(65, 5))
    model.to(device, torch.float64)
    twin = copy.deepcopy(model)
    ours = FusedSGD(model.parameters(), lr=1e-2, **options)
    theirs = torch.optim.SGD(twin.parameters(), lr=1e-2, **options)
    x = torch.randn(16, 33, device=device, dtype=torch.float64)
    y = torch.randn(16, 5, device=device, dtype=torch.float64)
    for _ in range(100):
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            (net(x) - y).square().clamp(max=1).mean().backward()
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        # Both round in float64, in another order; 100 steps multiply that by less than 1e4.
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_the_first_step_is_one_of_each_parameter(device):
    """A parameter that joins late, in front or at the end, changes no other's momentum."""
    hyper = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    values = torch.randn(3, 5, device=device, dtype=torch.float64)
    grads = torch.randn(4, 3, 5, device=device, dtype=torch.float64)
    seen = [[2, 3], [0, 1, 2, 3], [0, 3]]  # the steps in which each parameter has a gradient
    params = [torch.nn.Parameter(v.clone()) for v in values]
    optimizer = FusedSGD(params, **hyper)
    for t in range(4):
        for i, p in enumerate(params):
            p.grad = grads[t, i].clone() if t in seen[i] else None
        optimizer.step()
    for i, p in enumerate(params):
        expected = sgd_reference(values[i], *(grads[t, i] for t in seen[i]), **hyper)
        torch.testing.assert_close(p.detach(), expected)


def test_groups_have_their_own_numbers(device):
    values = [torch.randn(9, device=device) for _ in range(3)]
    grads = [torch.randn(9, device=device) for _ in range(3)]
    params = [torch.nn.Parameter(v.clone()) for v in values]
    optimizer = FusedSGD([{"params": params[:1], "lr": 0.5}, {"params": params[1:2], "lr": 0.25}])
    optimizer.add_param_group({"params": params[2:], "lr": 1.0, "momentum": 0.9})
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    optimizer.step()
    for p, v, g, lr in zip(params, values, grads, (0.5, 0.25, 1.0), strict=True):
        torch.testing.assert_close(p.detach(), v - lr * g)
    assert [bool(optimizer.state.get(p)) for p in params] == [False, False, True]


def test_dtypes_mix_in_one_group(device):
    values = [torch.randn(65, device=device, dtype=d) for d in FLOATS]
    params = [torch.nn.Parameter(v.clone()) for v in values]
    grads = [torch.randn_like(v) for v in values]
    optimizer = run_steps(FusedSGD, params, [grads], lr=0.1, momentum=0.9)
    for p, v, g in zip(params, values, grads, strict=True):
        assert_as_accurate_as(lambda p, g: sgd_reference(p, g, lr=0.1), p.detach(), v, g)
        assert optimizer.state[p]["momentum_buffer"].dtype == p.dtype


@pytest.mark.parametrize("grad_layout", ["same", "contiguous"])
def test_memory_formats_of_parameter_and_gradient(grad_layout, device):
    values = [
        channels_last(torch.randn(4, 5, 3, 7, device=device)),
        channels_last(torch.randn(2, 5, 2, 3, 7, device=device)),
        LAYOUTS["transposed"](torch.randn(4, 7, device=device)),
        LAYOUTS["misaligned"](torch.randn(130, device=device)),
    ]
    grads = [[torch.randn_like(v) for v in values] for _ in range(2)]
    if grad_layout == "contiguous":
        grads = [[g.contiguous() for g in step] for step in grads]
    params = [torch.nn.Parameter(v) for v in map(torch.clone, values)]
    optimizer = run_steps(FusedSGD, params, grads, lr=0.1, momentum=0.9)
    for i, (p, v) in enumerate(zip(params, values, strict=True)):
        assert optimizer.state[p]["momentum_buffer"].stride() == p.stride()
        own = [g[i] for g in grads]
        assert_as_accurate_as(
            lambda p, *g: sgd_reference(p, *g, lr=0.1, momentum=0.9), p.detach(), v, *own, ulps=2
        )


def test_ten_thousand_tiny_parameters(device):
    values = torch.randn(10_000, 7, device=device)
    grads = torch.randn(2, 10_000, 7, device=device)
    params = [torch.nn.Parameter(v.clone()) for v in values]
    run_steps(FusedSGD, params, grads, lr=0.1, momentum=0.9)
    actual = torch.stack([p.detach() for p in params])
    assert_as_accurate_as(
        lambda p, *g: sgd_reference(p, *g, lr=0.1, momentum=0.9), actual, values, *grads, ulps=2
    )


def test_replaced_tensors_are_noticed(device):
    """Parameter memory, gradients and buffers may be exchanged for others between steps."""
    param = torch.nn.Parameter(torch.zeros(9, device=device))
    optimizer = run_steps(FusedSGD, [param], [[torch.ones_like(param)]], lr=0.1, momentum=0.5)
    optimizer.state[param]["momentum_buffer"] = torch.full((9,), 4.0, device=device)
    param.data = torch.zeros(9, device=device)
    param.grad = torch.ones(9, device=device)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((9,), -0.3, device=device))
    optimizer.state.clear()
    param.grad = torch.ones(9, device=device)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((9,), -0.4, device=device))
    param.data = param.data.bfloat16()  # as model.bfloat16() does
    param.grad = torch.ones(9, device=device, dtype=torch.bfloat16)
    optimizer.step()
    torch.testing.assert_close(
        param.detach(), torch.full((9,), -0.55, device=device).bfloat16(), rtol=2**-7, atol=0
    )
    assert optimizer.state[param]["momentum_buffer"].dtype == torch.bfloat16


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_one_of_several_parameters_changes_its_dtype(momentum, device):
    """The operator refuses the list, which is then divided anew; nothing is counted twice."""
    params = [torch.nn.Parameter(torch.zeros(9, device=device)) for _ in range(3)]
    steps = [[torch.ones_like(p) for p in params] for _ in range(3)]
    optimizer = run_steps(FusedSGD, params, steps, lr=0.25, momentum=momentum)
    params[1].data = params[1].data.bfloat16()
    params[1].grad = None
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    moved = {0.0: -1.0, 0.5: -1.53125}[momentum]  # 0.25 x (1 + 1.5 + 1.75 + 1.875)
    for p in params:
        torch.testing.assert_close(p.detach(), torch.full_like(p, moved))
    assert params[1].dtype == torch.bfloat16


def test_nothing_to_do(device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = FusedSGD([param], lr=0.1, momentum=0.9)
    assert optimizer.step() is None
    assert param.eq(1).all()
    assert not optimizer.state_dict()["state"]


def test_zero_grad_obeys_its_argument(device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    for set_grad_none, argument, expect_none in [
        (True, None, True),
        (False, None, True),  # torch's own default
        (True, False, False),
        (False, True, True),
    ]:
        optimizer = FusedSGD([param], lr=0.1, set_grad_none=set_grad_none)
        param.grad = torch.ones_like(param)
        optimizer.zero_grad() if argument is None else optimizer.zero_grad(set_to_none=argument)
        assert (param.grad is None) == expect_none
        assert expect_none or torch.count_nonzero(param.grad) == 0


def test_inf_and_nan_propagate(device):
    param = torch.nn.Parameter(torch.ones(130, device=device))
    grad = torch.zeros(130, device=device)
    grad[3], grad[64], grad[129] = float("nan"), float("inf"), float("-inf")
    run_steps(FusedSGD, [param], [[grad]], lr=0.1, momentum=0.9, nesterov=True)
    values = param.detach()
    assert values[3].isnan()
    assert values[64] == float("-inf")
    assert values[129] == float("inf")
    assert values.isfinite().sum() == 127
