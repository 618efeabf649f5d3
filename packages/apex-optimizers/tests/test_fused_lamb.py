"""FusedLAMB against its formula in float64, over dtypes, sizes, layouts and options."""

import pytest
import torch

from apex.optimizers import FusedLAMB
from apex_testkit import FLOATS, LARGE, assert_as_accurate_as
from apex_testkit.grids import LAYOUTS, channels_last
from apex_testkit.optimizers import run_steps
from apex_testkit.optimizers_lamb import lamb_reference

SIZES = {
    "one": [1],
    "odd": [1, 7, 1023],
    "empty": [0, 5],
    "scalar": [()],
    "many": [3] * 70,
    "large": LARGE,
}
OPTIONS = {
    "default": {},
    "l2": {"adam_w_mode": False, "weight_decay": 0.1},
    "no_decay": {"weight_decay": 0.0},
    "nvlamb": {"weight_decay": 0.0, "use_nvlamb": True},
    "unclipped": {"max_grad_norm": 0.0, "weight_decay": 0.1},
    "betas": {"betas": (0.5, 0.8), "grad_averaging": False, "weight_decay": 0.1},
    "eps": {"eps": 1e-2, "bias_correction": False},
    "maximize": {"maximize": True, "max_grad_norm": 1e9},
}


def assert_follows(params, values, grads_per_step, ulps, **hyper):
    actual = [p.detach() for p in params]
    assert_as_accurate_as(
        lambda p, *g: lamb_reference(p, *g, **hyper), actual, values, *grads_per_step, ulps=ulps
    )


def make(sizes, device, dtype=torch.float32, steps=3):
    values = [torch.randn(n, device=device, dtype=dtype) for n in sizes]
    return values, [[torch.randn_like(v) for v in values] for _ in range(steps)]


def parameters(values):
    return [torch.nn.Parameter(v.clone()) for v in values]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_follows_the_formula(dtype, options, device):
    for sizes in SIZES.values():
        values, grads = make(sizes, device, dtype)
        params = parameters(values)
        run_steps(FusedLAMB, params, grads, lr=1e-2, **options)
        # The parameter is rounded once in each of three steps.
        assert_follows(params, values, grads, 3, lr=1e-2, **options)
        for p, own in zip(params, grads[-1], strict=True):
            assert torch.equal(p.grad, own)  # gradients stay as they were


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_hundred_steps(dtype, options, device):
    values, grads = make([1, 33, 130], device, dtype, steps=100)
    params = parameters(values)
    run_steps(FusedLAMB, params, grads, lr=1e-2, **options)
    # Rounded once in each of a hundred steps, mostly in both directions.
    assert_follows(params, values, grads, 20, lr=1e-2, **options)


def test_dtypes_mix_in_one_group_under_one_norm(device):
    values = [torch.randn(65, device=device, dtype=d) for d in FLOATS]
    grads = [[torch.randn_like(v) for v in values] for _ in range(2)]
    params = parameters(values)
    optimizer = run_steps(FusedLAMB, params, grads, lr=0.1)
    expected = lamb_reference(
        [v.double() for v in values], *([g.double() for g in step] for step in grads), lr=0.1
    )
    for p, e in zip(params, expected, strict=True):
        # Rounded once in each of two steps. The norm of float32 gradients is float32, and counts
        # for the float64 parameter, too.
        eps = max(torch.finfo(p.dtype).eps, torch.finfo(torch.float32).eps)
        torch.testing.assert_close(p.detach().double(), e, rtol=0, atol=2 * eps * e.abs().max())
    for p in params:
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        assert optimizer.state[p]["exp_avg"].dtype == wide
        assert optimizer.state[p]["exp_avg_sq"].dtype == wide


def test_groups_clip_the_common_norm_to_limits_of_their_own(device):
    values, grads = make([9, 9, 9], device, torch.float64, steps=1)
    limits = [0.0, 0.5, 2.0]
    params = parameters(values)
    groups = [{"params": [p], "max_grad_norm": m} for p, m in zip(params, limits, strict=True)]
    optimizer = FusedLAMB(groups[:2], lr=0.1)
    optimizer.add_param_group(groups[2])
    for p, g in zip(params, grads[0], strict=True):
        p.grad = g.clone()
    optimizer.step()
    norm = torch.cat(grads[0]).norm()
    assert norm > 2
    for p, g, limit in zip(params, grads[0], limits, strict=True):
        clipped = g if limit == 0 else g * limit / norm
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], 0.1 * clipped)


@pytest.mark.parametrize(("limit", "is_clipped"), [(5.001, False), (5.0, False), (4.999, True)])
def test_only_norms_beyond_the_limit_are_clipped(limit, is_clipped, device):
    param = torch.nn.Parameter(torch.ones(2, device=device, dtype=torch.float64))
    grad = torch.tensor([3.0, 4.0], device=device, dtype=torch.float64)
    optimizer = run_steps(FusedLAMB, [param], [[grad]], max_grad_norm=limit, betas=(0.5, 0.5))
    expected = grad * (limit / 5.0 if is_clipped else 1.0)
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], 0.5 * expected)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_norms_of_zero_leave_the_learning_rate(weight_decay, device):
    """Of a parameter that starts at 0, as biases do; and of an update that is 0."""
    values = [torch.zeros(5, device=device, dtype=torch.float64) for _ in range(2)]
    grads = [[torch.ones_like(values[0]), torch.zeros_like(values[1])]]
    params = parameters(values)
    run_steps(FusedLAMB, params, grads, lr=0.5, eps=0.5, weight_decay=weight_decay, use_nvlamb=True)
    gradient = 5**-0.5  # clipped to a norm of 1
    expected = torch.full_like(values[0], -0.5 * gradient / (gradient + 0.5))
    torch.testing.assert_close(params[0].detach(), expected)
    assert not params[1].any()


@pytest.mark.parametrize("grad_layout", ["same", "contiguous", "expanded"])
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
    if grad_layout == "expanded":
        grads = [[g.flatten()[0].expand(g.shape) for g in step] for step in grads]
    params = [torch.nn.Parameter(v) for v in map(torch.clone, values)]
    optimizer = FusedLAMB(params, lr=0.1)
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g
        optimizer.step()
    for p in params:
        assert optimizer.state[p]["exp_avg"].stride() == p.stride()
    assert_follows(params, values, grads, 2, lr=0.1)  # rounded once in each of two steps


@pytest.mark.slow
def test_ten_thousand_tiny_parameters(device):
    values = torch.randn(10_000, 7, device=device)
    grads = torch.randn(2, 10_000, 7, device=device)
    params = parameters(values)
    run_steps(FusedLAMB, params, grads, lr=0.1)
    actual = torch.stack([p.detach() for p in params])
    # Rounded once in each of two steps.
    assert_as_accurate_as(
        lambda p, *g: torch.stack(lamb_reference(list(p), *map(list, g), lr=0.1)),
        actual,
        values,
        *grads,
        ulps=2,
    )


def test_parameters_count_their_own_steps(device):
    """One joins late, one is missing at times, one never has a gradient."""
    values, grads = make([5, 6, 7, 8], device, torch.float64, steps=4)
    seen = [[0, 1, 2, 3], [2, 3], [0, 3], []]
    grads = [[g if t in seen[i] else None for i, g in enumerate(s)] for t, s in enumerate(grads)]
    params = parameters(values)
    optimizer = FusedLAMB(params, lr=0.1)
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = None if g is None else g.clone()
        optimizer.step()
    expected = lamb_reference(values, *grads, lr=0.1)
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), e)
    assert optimizer.param_groups[0]["step"] == 4
    assert [int(optimizer.state[p]["step"]) for p in params[:3]] == [4, 2, 2]
    assert params[3] not in optimizer.state


def test_replaced_tensors_are_noticed(device):
    param = torch.nn.Parameter(torch.ones(9, device=device))
    optimizer = run_steps(FusedLAMB, [param], [[torch.ones(9, device=device)]], weight_decay=0.0)
    optimizer.state[param]["exp_avg"] = torch.zeros(9, device=device)
    before = param.detach().clone()
    param.grad = torch.zeros(9, device=device)
    optimizer.step()
    assert torch.equal(param.detach(), before)  # no gradient, no momentum: no update
    optimizer.state.clear()
    param.grad = torch.ones(9, device=device)
    optimizer.step()
    assert torch.count_nonzero(optimizer.state[param]["exp_avg"]) == 9


def test_inf_and_nan_propagate(device):
    for bad in (float("nan"), float("inf")):
        values, _ = make([130, 5], device)
        grads = [torch.ones_like(v) for v in values]
        grads[0][129] = bad
        params = parameters(values)
        run_steps(FusedLAMB, params, [grads], lr=0.1)
        assert not params[0].isfinite().any()  # through the norm of the update
        expected = lamb_reference(values, grads, lr=0.1)
        assert torch.equal(params[1].isfinite(), expected[1].isfinite())


def test_schedulers_closures_and_hooks(device):
    param = torch.nn.Parameter(torch.ones(3, device=device, dtype=torch.float64))
    optimizer = FusedLAMB([param], lr=torch.tensor(0.5), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        calls.append("closure")
        optimizer.zero_grad()
        (param * 2).sum().backward()
        return "loss"

    for _ in range(2):
        assert optimizer.step(closure) == "loss"
        scheduler.step()
    assert calls == ["pre", "closure", "post"] * 2
    grads = [[torch.full((3,), 2.0, device=device, dtype=torch.float64)]] * 2
    first = lamb_reference([torch.ones_like(param)], *grads[:1], lr=0.5, weight_decay=0.0)
    # Constant gradients give constant updates.
    expected = 1 - 1.5 * (1 - first[0])
    torch.testing.assert_close(param.detach(), expected)


def test_zero_grad_and_nothing_to_do(device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = FusedLAMB([param], set_grad_none=False)
    assert optimizer.step() is None
    assert not optimizer.state_dict()["state"]
    param.grad = torch.ones_like(param)
    optimizer.zero_grad()
    assert not param.grad.any()
    optimizer.zero_grad(set_to_none=True)
    assert param.grad is None
    assert FusedLAMB([{"params": []}]).step() is None


def test_the_norm_is_never_asked_of_gradients_that_it_would_refuse(monkeypatch):
    from apex.optimizers.stepping import numbers

    calls, norm_of_all = [], numbers._norm_of_all
    monkeypatch.setattr(
        numbers, "_norm_of_all", lambda *args: calls.append(args) or norm_of_all(*args)
    )
    param = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = FusedLAMB([param])
    for grad in (torch.ones(1).expand(3, 4), torch.ones(3, 8)[:, ::2], torch.ones(4, 3).t()):
        param.grad = grad
        optimizer.step()
    assert len(calls) == 3
