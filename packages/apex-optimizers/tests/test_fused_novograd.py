"""FusedNovoGrad against its formula in float64, over dtypes, options and missing gradients."""

import copy
import functools

import pytest
import torch

from apex.optimizers import FusedNovoGrad
from apex_testkit import FLOATS, LARGE, assert_as_accurate_as
from apex_testkit.optimizers import run_steps
from apex_testkit.optimizers_novograd import novograd_reference

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
    "decay": {"weight_decay": 0.1, "betas": (0.95, 0.98)},
    "inside": {"weight_decay": 0.1, "reg_inside_moment": True},
    "uncorrected": {"weight_decay": 0.1, "bias_correction": False},
    "not_averaged": {"weight_decay": 0.1, "grad_averaging": False},
    "not_averaged_inside": {"grad_averaging": False, "reg_inside_moment": True},
    "max_norm": {"norm_type": 0, "betas": (0.9, 0.7)},
    "from_zero": {"init_zero": True, "betas": (0.9, 0.7)},
    "max_norm_from_zero": {"norm_type": 0, "init_zero": True, "reg_inside_moment": True},
    "eps": {"eps": 5.0},
    "maximize": {"weight_decay": 0.1, "maximize": True},
    "maximize_inside": {"weight_decay": 0.1, "maximize": True, "reg_inside_moment": True},
}


def make_grads(values, steps):
    """Gradients whose norms differ from step to step, so that blending them matters."""
    return [[torch.randn_like(v) * 2 ** (t % 4) for v in values] for t in range(steps)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_follows_the_formula(dtype, options, device):
    for sizes in SIZES.values():
        values = [torch.randn(n, device=device, dtype=dtype) for n in sizes]
        grads = make_grads(values, 10)
        params = [torch.nn.Parameter(v.clone()) for v in values]
        run_steps(FusedNovoGrad, params, grads, lr=1e-2, **options)
        for i, (p, v) in enumerate(zip(params, values, strict=True)):
            own = [g[i] for g in grads]
            # The parameter is rounded once in each of ten steps, at first at its first size.
            scale = v.abs().max().item() if v.numel() else 0.0
            formula = functools.partial(novograd_reference, lr=1e-2, **options)
            assert_as_accurate_as(formula, p.detach(), v, *own, ulps=10, scale=scale)


def test_norms_are_a_vector_per_kind_of_parameter(device):
    """In order of the group's parameters, whatever the order of dtypes."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]
    params = [torch.nn.Parameter(torch.zeros(4, device=device, dtype=d)) for d in dtypes]
    grads = [torch.full_like(p, i + 1.0) for i, p in enumerate(params)]
    optimizer = run_steps(FusedNovoGrad, params, [grads], lr=0.1)
    norms = optimizer.param_groups[0]["exp_avg_sq"]
    assert [n.tolist() for n in norms] == [[4.0, 8.0], [2.0, 10.0], [6.0]]
    assert [n.dtype for n in norms] == [torch.float32, torch.float32, torch.float64]
    assert all(n.device == params[0].device for n in norms)
    assert optimizer.param_groups[0]["step"] == 1
    narrow = run_steps(FusedNovoGrad, params[:1], [grads[:1]]).param_groups[0]["exp_avg_sq"]
    assert [n.tolist() for n in narrow] == [[], [2.0]]


def test_the_norm_of_several_chunks(device):
    """A chunk has 65,536 elements: a large one is alone in its chunk."""
    grad = torch.randn(65_537, device=device).bfloat16()
    grad[-1] = 1024
    param = torch.nn.Parameter(torch.zeros_like(grad))
    optimizer = run_steps(FusedNovoGrad, [param], [[grad]])
    (norm,) = optimizer.param_groups[0]["exp_avg_sq"][0]
    torch.testing.assert_close(norm.double(), grad.double().norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", [{}, {"init_zero": True, "norm_type": 0}], ids=str)
def test_each_parameters_first_gradient_starts_its_norm(options, device):
    hyper = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.7), **options}
    dtypes = [torch.float64, torch.float32, torch.float64, torch.float64]
    values = [torch.randn(9, device=device, dtype=d) for d in dtypes]
    grads = make_grads(values, 5)
    seen = [[2, 3], [0, 1, 2, 3, 4], [0, 3], [4]]  # the steps in which each has a gradient
    params = [torch.nn.Parameter(v.clone()) for v in values]
    optimizer = FusedNovoGrad(params, **hyper)
    for t in range(5):
        for i, p in enumerate(params):
            p.grad = grads[t][i].clone() if t in seen[i] else None
        optimizer.step()
    for i, p in enumerate(params):
        own = [grads[t][i] for t in seen[i]]
        assert_as_accurate_as(
            lambda p, *g: novograd_reference(p, *g, **hyper), p.detach(), values[i], *own, ulps=5
        )
        assert int(optimizer.state[p]["step"]) == len(own)
    assert optimizer.param_groups[0]["step"] == 5


@pytest.mark.parametrize("init_zero", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_parameters_may_join_and_leave_a_group(place, init_zero, device):
    hyper = {"lr": 0.1, "init_zero": init_zero}
    values = [torch.randn(9, device=device) for _ in range(3)]
    grads = make_grads(values, 4)
    params = [torch.nn.Parameter(v.clone()) for v in values]
    late = params[place]
    group_params = [p for p in params if p is not late]
    optimizer = FusedNovoGrad(group_params, **hyper)
    group = optimizer.param_groups[0]
    for t in range(4):
        if t == 2:
            group["params"].insert(place, late)
        for p, g in zip(params, grads[t], strict=True):
            p.grad = g.clone()
        optimizer.step()
    for i, (p, v) in enumerate(zip(params, values, strict=True)):
        own = [g[i] for g in (grads[2:] if p is late else grads)]
        assert_as_accurate_as(
            lambda p, *g: novograd_reference(p, *g, **hyper), p.detach(), v, *own, ulps=4
        )
    before = group["exp_avg_sq"][1].clone()
    del group["params"][place]
    for p, g in zip(params, grads[0], strict=True):
        p.grad = torch.zeros_like(g)
    optimizer.step()
    kept = before[[i for i in range(3) if i != place]]
    torch.testing.assert_close(group["exp_avg_sq"][1], kept * 0.999**0.5)


def test_a_replaced_parameter_hands_its_norm_on(device):
    """amp puts float32 masters where 16-bit parameters were, and moves their state to them."""
    params = [torch.nn.Parameter(torch.ones(4, device=device).half()) for _ in range(2)]
    grads = [torch.full_like(p, n) for p, n in zip(params, (1.0, 2.0), strict=True)]
    optimizer = run_steps(FusedNovoGrad, params, [grads], lr=0.1)
    group = optimizer.param_groups[0]
    masters = [torch.nn.Parameter(p.detach().float()) for p in params]
    for index, (param, master) in enumerate(zip(params, masters, strict=True)):
        group["params"][index] = master
        optimizer.state[master] = optimizer.state.pop(param)
        master.grad = torch.zeros_like(master)
    optimizer.step()
    assert group["exp_avg_sq"][0].tolist() == []
    expected = torch.tensor([2.0, 4.0], device=device) * 0.999**0.5
    torch.testing.assert_close(group["exp_avg_sq"][1], expected)


def test_one_norm_overflows_or_is_zero(device):
    """Squares beyond float32 have a norm within it; 0 / eps is 0."""
    params = [torch.nn.Parameter(torch.zeros(n, device=device)) for n in (3, 4)]
    grads = [torch.zeros(3, device=device), torch.full((4,), 1e25, device=device)]
    optimizer = run_steps(FusedNovoGrad, params, [grads, grads], lr=1.0)
    norms = optimizer.param_groups[0]["exp_avg_sq"][1]
    torch.testing.assert_close(norms, torch.tensor([0.0, 2e25], device=device))
    assert params[0].eq(0).all()
    for p, g in zip(params, grads, strict=True):
        assert_as_accurate_as(
            lambda p, *g: novograd_reference(p, *g, lr=1.0),
            p.detach(),
            torch.zeros_like(g).double(),  # the plain formula overflows in float32
            *[g.double()] * 2,
            ulps=2,
        )


def test_inf_and_nan_reach_their_tensor_alone(device):
    for norm_type in (2, 0):
        params = [torch.nn.Parameter(torch.ones(130, device=device)) for _ in range(3)]
        grads = [torch.ones(130, device=device) for _ in range(3)]
        grads[0][64], grads[1][129] = float("nan"), float("inf")
        optimizer = run_steps(FusedNovoGrad, params, [grads], norm_type=norm_type)
        norms = optimizer.param_groups[0]["exp_avg_sq"][1].tolist()
        assert norms[0] != norms[0]
        assert norms[1] == float("inf")
        assert params[0].isnan().all()
        assert params[1][129].isnan()
        assert params[2].isfinite().all()


def test_refused_options():
    param = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match="amsgrad"):
        FusedNovoGrad([param], amsgrad=True)
    with pytest.raises(RuntimeError, match=r"norm_type must be 2 .*, got 1"):
        FusedNovoGrad([param], norm_type=1)
    with pytest.raises(ValueError, match=r"betas\[1\] must be in \[0, 1\), got 1.0"):
        FusedNovoGrad([param], betas=(0.9, 1.0))


def test_a_copy_of_the_optimizer_goes_on_alike(device):
    values = [torch.randn(9, device=device) for _ in range(3)]
    params = [torch.nn.Parameter(v.clone()) for v in values]
    grads = make_grads(values, 3)
    optimizer = run_steps(FusedNovoGrad, params, grads[:2], reg_inside_moment=True)
    clone = copy.deepcopy(optimizer)
    assert clone.moment_mode == 0
    for o in (optimizer, clone):
        for p, g in zip(o.param_groups[0]["params"], grads[2], strict=True):
            p.grad = g.clone()
        o.step()
    for p, q in zip(params, clone.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q)
