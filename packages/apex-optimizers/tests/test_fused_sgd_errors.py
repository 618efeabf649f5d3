"""Bad input to FusedSGD and sgd_step: clear errors, and nothing changed; and opcheck."""

import copy

import pytest
import torch

from apex.optimizers.fused_sgd import FusedSGD
from apex.optimizers.fused_sgd.ops import sgd_step
from apex_testkit import FLOATS, opcheck_samples
from apex_testkit.grids import HALVES


def snapshot(params, optimizer):
    return [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict()["state"])


def make_bad_gradient(kind, param):
    """Set a gradient that autograd lets through, but a kernel cannot use."""
    param.grad = torch.ones_like(param)
    if kind == "sparse":
        param.grad = torch.ones_like(param).to_sparse()
    elif kind == "dtype":  # both were changed after the gradient was set
        param.grad.data = param.grad.data.double()
    else:
        param.data = torch.ones(8, 8, dtype=param.dtype, device=param.device)[::2, ::2]


@pytest.mark.parametrize("several_launches", [False, True])
@pytest.mark.parametrize("warm", [False, True], ids=["first_step", "later_step"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sparse", r"FusedSGD.step: the gradient of parameter \d is sparse"),
        ("dtype", r"FusedSGD.step: parameter \d and its gradient differ: .* float64"),
        ("gaps", r"FusedSGD.step: parameter \d, .*was not contiguous.*strides are \[16, 2\]"),
    ],
)
def test_a_failed_step_changes_nothing(kind, message, warm, several_launches, device):
    dtypes = [torch.float32, torch.bfloat16 if several_launches else torch.float32]
    params = [torch.nn.Parameter(torch.ones(4, 4, device=device, dtype=d)) for d in dtypes]
    optimizer = FusedSGD(params, lr=0.1, momentum=0.9)
    if warm:
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    optimizer.most_recent_scale = 2.0
    params[0].grad = torch.ones_like(params[0])
    make_bad_gradient(kind, params[1])
    values, state = snapshot(params, optimizer)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    after_values, after_state = snapshot(params, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(values, after_values, strict=True))
    assert state.keys() == after_state.keys()
    for index, entry in state.items():
        assert all(torch.equal(entry[k], after_state[index][k]) for k in entry)
    assert optimizer.most_recent_scale == 2.0
    params[1].data = torch.ones_like(values[1]).contiguous()
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert params[1].ne(1).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "lr must be given"),
        ({"lr": -1.0}, "lr must be >= 0, got -1.0"),
        ({"lr": float("nan")}, "lr must be >= 0, got nan"),
        ({"lr": torch.ones(2)}, r"lr must have one element, got shape \[2\]"),
        ({"lr": 0.1, "momentum": -0.5}, "momentum must be >= 0, got -0.5"),
        ({"lr": 0.1, "weight_decay": float("nan")}, "weight_decay must be >= 0, got nan"),
        ({"lr": 0.1, "nesterov": True}, "nesterov=True needs momentum > 0"),
        (
            {"lr": 0.1, "nesterov": True, "momentum": 0.9, "dampening": 0.1},
            "dampening = 0, got momentum 0.9 and dampening 0.1",
        ),
    ],
)
def test_bad_hyper_parameters(options, message):
    param = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=message):
        FusedSGD([param], **options)
    optimizer = FusedSGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    if options:
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [param], **options})
    assert len(optimizer.param_groups) == 1


def test_bad_parameters():
    short_param = torch.nn.Parameter(torch.ones(2).to(torch.float8_e5m2))
    with pytest.raises(TypeError, match=r"params\[0\] must be float64.*float8_e5m2"):
        FusedSGD([short_param], lr=0.1)
    optimizer = FusedSGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(TypeError, match="params"):
        optimizer.add_param_group({"params": [short_param]})
    assert len(optimizer.param_groups) == 1


# lr, device_lr, momentum, dampening, weight_decay, nesterov, wd_after_momentum, first_run, scale
NUMBERS = (0.1, None, 0.9, 0.0, 0.01, True, False, False, 0.5)


def lists(device, dtype=torch.float32, count=3):
    return [[torch.randn(n, device=device).to(dtype) for n in (5, 130)] for _ in range(count)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_op_passes_opcheck(dtype, device):
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    lr = torch.ones(1, device=device)
    params, grads, buffers = lists(device, dtype)
    no_momentum = (0.1, lr, 0.0, *NUMBERS[3:5], False, *NUMBERS[6:])
    samples = [
        (params, grads, buffers, [], *NUMBERS, flag),
        (params, grads, [], [], *no_momentum, None),
    ]
    if dtype in HALVES:
        masters, wide_buffers = lists(device, count=2)
        samples.append((masters, grads, wide_buffers, params, *NUMBERS, None))
    opcheck_samples(sgd_step, samples)


def test_op_compiles_into_one_graph(device):
    def update(params, grads, buffers):
        sgd_step(params, grads, buffers, [], *NUMBERS, None)
        return [p * 2 for p in params]

    eager = lists(device)
    compiled = copy.deepcopy(eager)
    expected = update(*eager)
    actual = torch.compile(update, fullgraph=True)(*compiled)
    for a, b in zip(
        expected + eager[0] + eager[2], actual + compiled[0] + compiled[2], strict=True
    ):
        assert torch.equal(a, b)


def test_op_does_nothing_where_the_flag_is_set(device):
    params, grads, buffers = lists(device)
    before = copy.deepcopy((params, buffers))
    flag = torch.ones(1, dtype=torch.int32, device=device)
    sgd_step(params, grads, buffers, [], *NUMBERS, flag)
    for now, then in zip((params, buffers), before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(now, then, strict=True))


def test_op_names_what_does_not_match(device):
    p, g, m = lists(device)
    half = [t.half() for t in p]
    long_flag = torch.zeros(1, dtype=torch.int64, device=device)
    before = [t.clone() for t in p]
    for arguments, message in (
        ((p, [g[0], g[1][:4]], m, []), r"size mismatch.*grads\[1\] is \[4\] float32"),
        ((p, half, m, []), "params are float32, but grads are float16"),
        ((p, g, m[:1], []), "momentum_buffers has 1 tensors, but params has 2"),
        ((p, g, [], []), "momentum_buffers must be given if momentum is not 0"),
        ((p, g, half, []), "momentum_buffers must have the dtype of params, float32"),
        ((half, g, half, half), "with copies params must be float32"),
        ((p, g, m, p), "copies must be float16 or bfloat16, got float32"),
        ((p, [t.bfloat16() for t in g], m, half), "grads float32 or of the copies' dtype"),
    ):
        with pytest.raises(RuntimeError, match=message):
            sgd_step(*arguments, *NUMBERS, None)
    with pytest.raises(RuntimeError, match="noop_flag must be one int32 number on the device"):
        sgd_step(p, g, m, [], *NUMBERS, long_flag)
    with pytest.raises(RuntimeError, match="device_lr must be one float32 number"):
        sgd_step(p, g, m, [], 0.1, long_flag, *NUMBERS[2:], None)
    assert all(torch.equal(a, b) for a, b in zip(p, before, strict=True))
