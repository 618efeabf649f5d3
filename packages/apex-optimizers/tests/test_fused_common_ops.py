"""adagrad_step, novograd_step and lars_step as citizens of torch: opcheck, compile, messages."""

import copy

import pytest
import torch

from apex.optimizers.fused_adagrad.ops import adagrad_step
from apex.optimizers.fused_lars.ops import lars_step
from apex.optimizers.fused_novograd.ops import novograd_step
from apex_testkit import FLOATS, HALVES, opcheck_samples

ADAGRAD = (0.1, 1e-10, 0.01, False, True)
# lr, betas, eps, decay, step, correction, averaging, inside, max norm, first run, maximize
NOVOGRAD = (0.1, 0.9, 0.99, 1e-8, 0.01, 2, True, True, False, False, False, False)
# lr, device_lr, trust, eps, momentum, decay, nesterov, first run, scale
LARS = (0.1, None, 0.01, 0.0, 0.9, 0.01, True, False, 0.5)


def lists(device, dtype=torch.float32, count=3):
    """Lists of positive numbers, which sums and norms may be."""
    return [[torch.rand(n, device=device).to(dtype) for n in (5, 0, 130)] for _ in range(count)]


def numbers(device, dtype=torch.float32):
    return torch.rand(3, device=device, dtype=dtype)


def on_device(device, lr=0.25, step=3, inv_scale=0.5, found_inf=0.0):
    """What novograd_step can read on the device."""
    numbers = [torch.tensor([number], device=device) for number in (lr, step, inv_scale, found_inf)]
    return numbers[0], numbers[1].int(), *numbers[2:]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ops_pass_opcheck(dtype, device):
    params, grads, own = lists(device, dtype)
    wide = [t.float() for t in own]
    opcheck_samples(adagrad_step, [(params, grads, state, *ADAGRAD) for state in (own, wide)])
    opcheck_samples(
        novograd_step,
        [
            (params, grads, own, numbers(device), *NOVOGRAD),
            (params, grads, wide, numbers(device), *NOVOGRAD, None, *on_device(device)),
        ],
    )
    norms = [numbers(device, torch.promote_types(dtype, torch.float32)) for _ in range(2)]
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    samples = [(params, grads, own, [], *norms, *LARS, flag)]
    samples += [(params, grads, wide, [], None, None, *LARS, None)]
    if dtype in HALVES:
        masters, buffers = lists(device, count=2)
        samples.append((masters, grads, buffers, params, *norms, *LARS, None))
    opcheck_samples(lars_step, samples)


@pytest.mark.parametrize("name", ["adagrad", "novograd", "lars"])
def test_op_compiles_into_one_graph(name, device):
    def update(params, grads, states, norms):
        if name == "adagrad":
            adagrad_step(params, grads, states, *ADAGRAD)
        elif name == "novograd":
            novograd_step(params, grads, states, norms, *NOVOGRAD)
        else:
            lars_step(params, grads, states, [], norms, norms, *LARS, None)
        return [p * 2 for p in params]

    eager = [*lists(device), numbers(device)]
    compiled = copy.deepcopy(eager)
    start = copy.deepcopy(eager[0])
    expected = update(*eager)
    actual = torch.compile(update, fullgraph=True)(*compiled)
    assert not torch.equal(eager[0][0], start[0])
    for a, b in zip(
        [*expected, *eager[0], *eager[2], eager[3]],
        [*actual, *compiled[0], *compiled[2], compiled[3]],
        strict=True,
    ):
        assert torch.equal(a, b)


def test_lars_does_nothing_where_the_flag_is_set(device):
    params, grads, buffers = lists(device)
    before = copy.deepcopy((params, buffers))
    flag = torch.ones(1, dtype=torch.int32, device=device)
    lars_step(params, grads, buffers, [], None, None, *LARS, flag)
    for now, then in zip((params, buffers), before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(now, then, strict=True))


def test_lars_reads_the_learning_rate_on_the_device(device):
    params, grads, buffers = lists(device)
    expected = copy.deepcopy((params, buffers))
    norms = [numbers(device) for _ in range(2)]
    lr = torch.full((1,), 0.1, device=device)
    lars_step(params, grads, buffers, [], *norms, 7.0, lr, *LARS[2:], None)
    lars_step(expected[0], grads, expected[1], [], *norms, lr.item(), *LARS[1:], None)
    assert all(torch.equal(a, b) for a, b in zip(params, expected[0], strict=True))


@pytest.mark.parametrize("first_run", [False, True])
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_novograd_uses_numbers_on_the_device_instead(dtype, step, first_run, device):
    params, grads, moments = lists(device, dtype)
    norms = numbers(device)
    other = copy.deepcopy([params, [g * 2 for g in grads], moments, norms])  # doubling is exact
    flags = (True, True, False, False)
    novograd_step(
        params, grads, moments, norms, 0.25, *NOVOGRAD[1:5], step, *flags,
        first_run and step == 1, False,
    )  # fmt: skip
    given = (7.0, *NOVOGRAD[1:5], 9, *flags, first_run, False, None, *on_device(device, step=step))
    novograd_step(*other, *given)
    assert torch.equal(norms, other[3])
    for ours, theirs in ((params, other[0]), (moments, other[2])):
        assert all(map(torch.equal, ours, theirs))


def test_novograd_does_nothing_where_the_flag_is_set(device):
    own = [*lists(device), numbers(device)]
    before = copy.deepcopy(own)
    novograd_step(*own, *NOVOGRAD, None, *on_device(device, found_inf=1.0))
    for now, then in zip(own, before, strict=True):
        assert all(map(torch.equal, now, then))


def test_ops_name_what_does_not_match(device):
    p, g, m = lists(device)
    half, double = [t.half() for t in p], [t.double() for t in p]
    short = [g[0], g[1], g[2][:4]]
    n = numbers(device)
    before = [t.clone() for t in p]
    for op, arguments, message in (
        (adagrad_step, (p, short, m, *ADAGRAD), r"size mismatch.*grads\[2\] is \[4\] float32"),
        (adagrad_step, (p, half, m, *ADAGRAD), "params are float32, but grads are float16"),
        (adagrad_step, (p, g, half, *ADAGRAD), "sums must be float32 or of the dtype of params"),
        (adagrad_step, (p, g, m[:1], *ADAGRAD), "sums has 1 tensors, but params has 3"),
        (novograd_step, (p, short, m, n, *NOVOGRAD), r"size mismatch.*grads\[2\] is \[4\]"),
        (novograd_step, (p, half, m, n, *NOVOGRAD), "params are float32, but grads are float16"),
        (novograd_step, (p, g, double, n, *NOVOGRAD), "exp_avgs must be of that dtype or float32"),
        (novograd_step, (p, g, m, n.double(), *NOVOGRAD), "norms float32 or.*norms float64"),
        (novograd_step, (half, half, half, n.half(), *NOVOGRAD), "norms must be float32"),
        (novograd_step, (p, g, m, n[:2], *NOVOGRAD), r"norms must hold 3 .*got \[2\] float32"),
        (novograd_step, (p, g, m, n, *NOVOGRAD, None, n), "device_lr must .*one"),
        (novograd_step, (p, g, m, n, *NOVOGRAD, None, None, n[:1]), "device_step"),
        (novograd_step, (p, g, m, n.repeat(2)[::2], *NOVOGRAD), "norms must hold 3 contiguous"),
        (lars_step, (p, short, m, [], n, n, *LARS, None), r"size mismatch.*grads\[2\] is \[4\]"),
        (lars_step, (p, half, m, [], n, n, *LARS, None), "params are float32, but grads are"),
        (lars_step, (p, g, [], [], n, n, *LARS, None), "momentum_buffers must be given if"),
        (lars_step, (p, g, double, [], n, n, *LARS, None), "momentum_buffers must be float32 or"),
        (lars_step, (p, g, m, [], n, None, *LARS, None), "must be given both, or neither"),
        (lars_step, (p, g, m, [], n, n[:2], *LARS, None), r"param_norms must hold 3 contiguous"),
        (lars_step, (p, g, m, [], n.double(), n, *LARS, None), "grad_norms must hold 3 .*float32"),
        (lars_step, (p, g, m, p, n, n, *LARS, None), "copies float32"),
        (lars_step, (half, g, m, half, n, n, *LARS, None), "params must be float32"),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(p, before, strict=True))
