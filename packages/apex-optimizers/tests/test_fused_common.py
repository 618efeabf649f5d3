"""What FusedAdagrad, FusedNovoGrad and FusedLARS do alike: layouts, groups, hooks, failures."""

import copy
import functools

import pytest
import torch

from apex.optimizers import FusedAdagrad, FusedLARS, FusedNovoGrad
from apex_testkit import FLOATS, LAYOUTS, assert_as_accurate_as
from apex_testkit.grids import channels_last
from apex_testkit.optimizers import run_steps
from apex_testkit.optimizers_adagrad import adagrad_reference
from apex_testkit.optimizers_lars import lars_reference
from apex_testkit.optimizers_novograd import novograd_reference

LARS = {"momentum": 0.9, "weight_decay": 0.1, "trust_coefficient": 0.5}
CASES = {
    "adagrad": (FusedAdagrad, adagrad_reference, {"lr": 0.1, "weight_decay": 0.1}),
    "novograd": (FusedNovoGrad, novograd_reference, {"lr": 0.1, "weight_decay": 0.1}),
    "lars": (FusedLARS, lars_reference, {"lr": 0.1, **LARS}),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request):
    """The class, with its hyper-parameters, and the formula, with the same."""
    cls, reference, hyper = request.param
    return functools.partial(cls, **hyper), functools.partial(reference, **hyper)


def check_all(reference, params, values, grads_per_step):
    """Every parameter follows the formula; it is rounded once a step."""
    for i, (p, v) in enumerate(zip(params, values, strict=True)):
        own = [grads[i] for grads in grads_per_step if grads[i] is not None]
        assert_as_accurate_as(reference, p.detach(), v, *own, ulps=len(own))


@pytest.mark.parametrize("grad_layout", ["same", "contiguous"])
def test_memory_formats_of_parameter_and_gradient(case, grad_layout, device):
    make, reference = case
    values = [
        channels_last(torch.randn(4, 5, 3, 7, device=device)),
        channels_last(torch.randn(2, 5, 2, 3, 7, device=device)),
        LAYOUTS["transposed"](torch.randn(4, 7, device=device)),
        LAYOUTS["misaligned"](torch.randn(130, device=device)),
    ]
    grads = [[torch.randn_like(v) for v in values] for _ in range(2)]
    if grad_layout == "contiguous":
        grads = [[g.contiguous() for g in step] for step in grads]
    before = [[g.clone() for g in step] for step in grads]
    params = [torch.nn.Parameter(v) for v in map(torch.clone, values)]
    optimizer = run_steps(make, params, grads)
    check_all(reference, params, values, before)
    for p in params:
        states = [s for k, s in optimizer.state[p].items() if k != "step"]
        assert [s.stride() for s in states] == [p.stride()]


def test_gradients_are_not_overwritten(case, device):
    make, _ = case
    params = [torch.nn.Parameter(torch.randn(65, device=device)) for _ in range(2)]
    grads = [torch.randn_like(p) for p in params]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    make(params).step()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))


def test_dtypes_mix_in_one_group(case, device):
    make, reference = case
    dtypes = [*FLOATS, *reversed(FLOATS)]
    values = [torch.randn(65 + i, device=device, dtype=d) for i, d in enumerate(dtypes)]
    params = [torch.nn.Parameter(v.clone()) for v in values]
    grads = [[torch.randn_like(v) for v in values] for _ in range(3)]
    run_steps(make, params, grads)
    check_all(reference, params, values, grads)


@pytest.mark.slow
def test_ten_thousand_tiny_parameters(case, device):
    make, reference = case
    values = torch.randn(10_000, 7, device=device)
    grads = torch.randn(2, 10_000, 7, device=device)
    params = [torch.nn.Parameter(v.clone()) for v in values]
    run_steps(make, params, grads)
    actual = torch.stack([p.detach() for p in params])
    # Parameter by parameter, because some formulas have a norm of each.
    every = torch.vmap(reference) if make.func is not FusedAdagrad else reference
    if make.func is FusedLARS:
        every = _rowwise_lars
    assert_as_accurate_as(every, actual, values, *grads, ulps=2)


def _rowwise_lars(p, *grads):
    hyper = CASES["lars"][2]
    return torch.stack(
        [lars_reference(row, *own, **hyper) for row, *own in zip(p, *grads, strict=True)]
    )


def test_gradients_missing_at_times(case, device):
    make, reference = case
    values = [torch.randn(9, device=device, dtype=torch.float64) for _ in range(4)]
    seen = [[2, 3], [0, 1, 2, 3], [0, 3], []]  # the steps in which each has a gradient
    grads = [
        [torch.randn_like(v) if t in seen[i] else None for i, v in enumerate(values)]
        for t in range(4)
    ]
    params = [torch.nn.Parameter(v.clone()) for v in values]
    optimizer = make(params)
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = None if g is None else g.clone()
        optimizer.step()
    check_all(reference, params, values, grads)


def test_groups_and_a_group_added_later(case, device):
    make, reference = case
    values = [torch.randn(9, device=device) for _ in range(4)]
    params = [torch.nn.Parameter(v.clone()) for v in values]
    grads = [[torch.randn_like(v) for v in values] for _ in range(4)]
    optimizer = make([{"params": params[:1]}, {"params": params[1:2], "lr": 0.05}])
    for t, step in enumerate(grads):
        if t == 2:
            optimizer.add_param_group({"params": params[2:3], "lr": 0.2})
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
    for i, (lr, own) in enumerate([(0.1, grads), (0.05, grads), (0.2, grads[2:])]):
        assert_as_accurate_as(
            functools.partial(reference, lr=lr),
            params[i].detach(),
            values[i],
            *(g[i] for g in own),
            ulps=len(own),
        )
    assert torch.equal(params[3].detach(), values[3])


def test_nothing_to_do(case, device):
    make, _ = case
    param = torch.nn.Parameter(torch.ones(3, device=device))
    empty = torch.nn.Parameter(torch.ones(0, device=device))
    optimizer = make([{"params": [param]}, {"params": [empty]}])
    assert optimizer.step() is None
    empty.grad = torch.ones_like(empty)
    optimizer.step()
    assert param.eq(1).all()
    assert param not in optimizer.state


def test_replaced_gradients_and_states_are_noticed(case, device):
    make, reference = case
    value = torch.randn(9, device=device)
    grads = [torch.randn_like(value) for _ in range(3)]
    param = torch.nn.Parameter(value.clone())
    optimizer = make([param])
    for g in grads:
        param.grad = g.clone()
        optimizer.step()
        # Equal, but elsewhere; what was there must not be used any more.
        for key, old in list(optimizer.state[param].items()):
            optimizer.state[param][key] = old.clone()
            old.fill_(float("nan") if key != "step" else 1e6)
        param.grad.fill_(float("nan"))
        param.data = param.data.clone()
    assert_as_accurate_as(reference, param.detach(), value, *grads, ulps=3)


@pytest.mark.parametrize("lr_dtype", [torch.float32, torch.float64])
def test_learning_rate_may_be_a_tensor(case, lr_dtype, device):
    make, reference = case
    value, grad = torch.randn(2, 5, device=device)
    lr = torch.tensor([0.25], dtype=lr_dtype)
    param = torch.nn.Parameter(value.clone())
    run_steps(functools.partial(make, lr=lr), [param], [[grad]])
    assert_as_accurate_as(functools.partial(reference, lr=0.25), param.detach(), value, grad)


def test_scheduler_hooks_and_closure(case, device):
    make, reference = case
    param = torch.nn.Parameter(torch.ones(3, device=device))
    value = param.detach().clone()
    optimizer = make([param])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        calls.append("closure")
        loss = (param * 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6.0
    assert calls == ["pre", "closure", "post"]
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert_as_accurate_as(reference, param.detach(), value, torch.full_like(value, 2))


def test_autograd_notices_the_change(case, device):
    make, _ = case
    param = torch.nn.Parameter(torch.ones(3, device=device))
    loss = param.square().sum()
    param.grad = torch.ones_like(param)
    make([param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_zero_grad_obeys_its_argument(case, device):
    make, _ = case
    param = torch.nn.Parameter(torch.ones(3, device=device))
    for argument in (True, False):
        param.grad = torch.ones_like(param)
        make([param], set_grad_none=not argument).zero_grad(set_to_none=argument)
        assert (param.grad is None) == argument
    make([param], set_grad_none=True).zero_grad()
    assert param.grad is None


def make_bad(kind, param):
    param.grad = torch.ones_like(param)
    if kind == "sparse":
        param.grad = torch.ones_like(param).to_sparse()
    elif kind == "dtype":  # changed after the gradient was set
        param.grad.data = param.grad.data.double()
    else:
        param.data = torch.ones(8, 8, dtype=param.dtype, device=param.device)[::2, ::2]


@pytest.mark.parametrize("divided", ["one_launch", "two_dtypes", "two_groups"])
@pytest.mark.parametrize("warm", [False, True], ids=["first_step", "later_step"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sparse", r"step: the gradient of parameter \d is sparse"),
        ("dtype", r"step: parameter \d and its gradient differ: .* float64"),
        ("gaps", r"step: parameter \d, .*was not contiguous.*strides are \[16, 2\]"),
    ],
)
def test_a_failed_step_changes_nothing(case, kind, message, warm, divided, device):
    make, _ = case
    dtypes = [torch.float32, torch.bfloat16 if divided == "two_dtypes" else torch.float32]
    params = [torch.nn.Parameter(torch.ones(4, 4, device=device, dtype=d)) for d in dtypes]
    groups = [{"params": [p]} for p in params] if divided == "two_groups" else params
    optimizer = make(groups)
    for p in params:
        p.grad = torch.ones_like(p)
    if warm:
        optimizer.step()
    make_bad(kind, params[1])
    values = [p.detach().clone() for p in params]
    state, group = copy.deepcopy(dict(optimizer.state)), copy.deepcopy(optimizer.param_groups)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert all(torch.equal(p, v) for p, v in zip(params, values, strict=True))
    assert len(optimizer.state) == len(state)
    for now, then in zip(optimizer.state.values(), state.values(), strict=True):
        assert now.keys() == then.keys()
        assert all(torch.equal(now[key], then[key]) for key in now)
    assert [g.keys() for g in optimizer.param_groups] == [g.keys() for g in group]
    params[1].data = torch.ones_like(values[1]).contiguous()
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert params[1].ne(1).all()


def test_bad_parameters(case):
    make, _ = case
    short_param = torch.nn.Parameter(torch.ones(2).to(torch.float8_e5m2))
    with pytest.raises(TypeError, match=r"params\[0\] must be float64.*float8_e5m2"):
        make([short_param])
    optimizer = make([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match="params"):
        optimizer.add_param_group({"params": [short_param]})
    with pytest.raises(ValueError, match="weight_decay must be >= 0, got -1"):
        optimizer.add_param_group(
            {"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": -1}
        )
    assert len(optimizer.param_groups) == 1
