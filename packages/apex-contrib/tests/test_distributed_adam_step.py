"""The operator of DistributedFusedAdam, and Apex's module over it, against float64."""

import distributed_adam_cuda
import pytest
import torch

from apex.contrib.optimizers.distributed.held_values import join, split
from apex.contrib.optimizers.distributed.scaling import scales_for
from apex.contrib.optimizers.distributed_adam import distributed_adam_peaks, distributed_adam_step
from apex_testkit import assert_as_accurate_as
from apex_testkit.opcheck import opcheck_samples

STORED = [torch.float32, torch.float16, torch.bfloat16]
SIZES = {"odd": [1, 7, 1023], "empty": [0, 5], "large": [20_011]}
NUMBERS = (1e-2, 0.8, 0.95, 1e-6, 0.1, 3, True)  # lr to bias_correction


def adam(p, g, m, v, decoupled, scale=1.0, number=0):
    """New parameter, exp_avg or exp_avg_sq, by ``number``; the oracle."""
    lr, beta1, beta2, eps, decay, step, _ = NUMBERS
    g = g * scale
    g = g if decoupled else g + decay * p
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
    p = p - lr * (update + (decay * p if decoupled else 0))
    return (p, m, v)[number]


def make(sizes, device, *dtypes):
    lists = [[torch.randn(n, device=device).to(dtype) for n in sizes] for dtype in dtypes]
    lists[3] = [v.abs() for v in lists[3]]
    return lists


def on(device, value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype, device=device)


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("state", STORED, ids=str)
@pytest.mark.parametrize("grad", STORED, ids=str)
@pytest.mark.parametrize("param", STORED, ids=str)
def test_every_dtype(param, grad, state, decoupled, device):
    for sizes in SIZES.values():
        lists = make(sizes, device, param, grad, state, state)
        params, grads, exp_avgs, exp_avg_sqs = [[t.clone() for t in each] for each in lists]
        copies = [torch.empty_like(p, dtype=grad) for p in params]
        distributed_adam_step(
            params, grads, exp_avgs, exp_avg_sqs, [], copies, None, None, None, None,
            on(device, 0.5), None, *NUMBERS, decoupled,
        )  # fmt: skip
        for i, before in enumerate(zip(*lists, strict=True)):
            assert torch.equal(grads[i], before[1])
            for number, after in enumerate((params[i], exp_avgs[i], exp_avg_sqs[i])):
                if after.numel():
                    assert_as_accurate_as(
                        lambda *x, n=number: adam(*x, decoupled, 0.5, n), after, *before
                    )
            if copies[i].numel():
                assert_as_accurate_as(lambda *x: adam(*x, decoupled, 0.5), copies[i], *before)


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_remainders_scales_and_device_numbers_are_the_same_step(decoupled, device):
    """Bit for bit: whole values, halves of them, scales of one, and numbers on the device."""
    values = make([300, 5], device, *[torch.float32] * 4)
    results = []
    for way in ("plain", "halves", "scales", "device"):
        params, grads, exp_avgs, exp_avg_sqs = [[t.clone() for t in each] for each in values]
        rests, copies, scales, lr, step = [], [], None, None, None
        numbers = list(NUMBERS)
        if way == "halves":
            params, rests = map(list, zip(*map(split, params), strict=True))
            copies = [torch.empty_like(p) for p in params]
        elif way == "scales":
            scales = torch.ones(2, 3, device=device)
        elif way == "device":
            lr, step = on(device, NUMBERS[0]), on(device, 3, torch.int32)
            numbers[0], numbers[5] = 9.0, 1
        distributed_adam_step(
            params, grads, exp_avgs, exp_avg_sqs, rests, copies, scales, scales, lr, step,
            on(device, 0.3), on(device, 0.0), *numbers, decoupled,
        )  # fmt: skip
        if rests:
            assert all(torch.equal(p, c) for p, c in zip(params, copies, strict=True))
            params = [join(p, r) for p, r in zip(params, rests, strict=True)]
        results.append([*params, *exp_avgs, *exp_avg_sqs])
    for result in results[1:3]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    for a, b in zip(results[3], results[0], strict=True):  # lr is rounded to float32 there
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_halves(device):
    # Drawn on the CPU: on a GPU other numbers, some of them infinite, could come out.
    values = torch.randn(10_000) * 10.0 ** torch.arange(-38, 38, 0.0076)[:10_000]
    values = values.to(device)
    values[:4] = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0])
    high, rest = split(values)
    assert torch.equal(join(high, rest), values)
    bound = values.double().abs() * 2.0**-8 + 2.0**-134  # subnormal numbers
    assert ((high.double() - values).abs() <= bound)[4:].all()


def largest_of(values):
    """Of every tensor, the largest new parameter, exp_avg and exp_avg_sq."""
    rows = []
    for before in zip(*values, strict=True):
        results = [adam(*(x.double() for x in before), True, 1.0, n).abs() for n in range(3)]
        rows.append(torch.stack([r.max() if r.numel() else r.sum() for r in results]))
    return torch.stack(rows)


def test_peaks_of_several_chunks(device):
    """A chunk has 65,536 elements: the largest one is alone in its chunk."""
    values = make([5, 65_537], device, *[torch.bfloat16] * 4)
    for each, largest in zip(values, (128, 1024, 256, 65_536), strict=True):
        each[1][-1] = largest
    peaks = distributed_adam_peaks(*values, None, None, None, None, *NUMBERS, True)
    torch.testing.assert_close(peaks, largest_of(values), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", STORED[1:], ids=str)
def test_peaks_and_scales(dtype, device):
    values = make([300, 5, 0], device, *[torch.float32] * 4)
    values[1] = [g * 1e-8 for g in values[1]]
    values[3] = [v * 1e-14 for v in values[3]]
    peaks = distributed_adam_peaks(*values, None, None, None, None, *NUMBERS, True)
    torch.testing.assert_close(peaks, largest_of(values), rtol=1e-6, atol=0)
    scales = scales_for(peaks, dtype)
    stored = peaks / scales
    assert torch.equal(torch.exp2(torch.log2(scales).round()), scales)
    if dtype == torch.float16:
        assert ((stored == 0) | ((stored > 2.0**14) & (stored <= 2.0**15))).all()
    else:
        assert (scales == 1).all()


def test_found_inf_changes_nothing(device):
    lists = make([300], device, *[torch.float32] * 4)
    before = [each[0].clone() for each in lists]
    distributed_adam_step(
        *lists, [], [], None, None, None, None, None, on(device, 1.0), *NUMBERS, True
    )
    assert all(torch.equal(each[0], b) for each, b in zip(lists, before, strict=True))


def test_apexs_module(device):
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    lr, beta1, beta2, eps, decay, step, _ = NUMBERS
    for mode in (0, 1):
        p, g, m, v = [each[0] for each in make([300], device, *[torch.float32] * 4)]
        expected = [adam(*(x.double() for x in (p, g, m, v)), mode == 1, 0.5, n) for n in range(3)]
        numbers = (beta1, beta2, eps, step, mode, 1, decay)
        high, rest = split(p)
        ways = {
            "multi_tensor_fused_adam": ([p.clone()], lr, step),
            "multi_tensor_fused_adam_capturable": (
                [p.clone()], on(device, lr), on(device, [step], torch.int32)
            ),
            "multi_tensor_fused_adam_with_param_remainders": ([high, rest], lr, step),
        }  # fmt: skip
        for name, (params, rate, count) in ways.items():
            out = torch.empty(300, dtype=torch.bfloat16, device=device)
            states = [m.clone(), v.clone()]
            lists = [[t] for t in (*params, *states, g, out)]
            arguments = (rate, beta1, beta2, eps, count, *numbers[4:])
            getattr(distributed_adam_cuda, name)(512, flag, lists, on(device, 0.5), *arguments)
            new = join(*params) if len(params) == 2 else params[0]
            for actual, wanted in zip((new, *states), expected, strict=True):
                torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-6)
            assert ((out.double() - new.double()).abs() <= new.double().abs() * 2.0**-8).all()
    set_flag = torch.ones_like(flag)
    lists = [[t.clone()] for t in (p, m, v, g, out)]
    distributed_adam_cuda.multi_tensor_fused_adam_capturable(
        512, set_flag, lists, on(device, 1.0), on(device, lr), beta1, beta2, eps,
        on(device, [step], torch.int32), 1, 1, decay,
    )  # fmt: skip
    assert torch.equal(lists[0][0], p)
    with pytest.raises(RuntimeError, match="must hold 5 lists, got 2"):
        distributed_adam_cuda.multi_tensor_fused_adam(
            512, flag, [[p], [g]], on(device, 1.0), lr, *numbers
        )
    with pytest.raises(RuntimeError, match="mode must be 0"):
        distributed_adam_cuda.multi_tensor_fused_adam(
            512, flag, [[p], [m], [v], [g], [out]], on(device, 1.0), lr, *numbers[:4], 2, 1, 0
        )


def arguments(device):
    p, g, m, v = make([6, 3], device, *[torch.float32] * 4)
    return [p, g, m, v, [], [], None, None, None, None, None, None, *NUMBERS, True]


@pytest.mark.parametrize(
    ("index", "value", "text"),
    [
        (17, 0, "step must be 1"),
        (13, 1.0, "beta1 must be in"),
        (15, -1.0, "eps must be >= 0"),
        (1, [torch.ones(6)], "grads has 1 tensors, but params has 2"),
        (0, [torch.ones(6, dtype=torch.float64)] * 2, "params must be float32, float16"),
        (6, torch.ones(5), r"three numbers per fragment \(6\)"),
        (4, [torch.zeros(6, dtype=torch.int16), torch.zeros(3, dtype=torch.int16)], "copies has 0"),
    ],
)
def test_bad_arguments_change_nothing(index, value, text):
    given = arguments("cpu")
    before = [t.clone() for t in given[2]]
    if index == 0:
        value = [torch.ones(6, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    given[index] = value
    with pytest.raises(RuntimeError, match=text):
        distributed_adam_step(*given)
    assert all(torch.equal(a, b) for a, b in zip(given[2], before, strict=True))


def test_opcheck(device):
    given = arguments(device)
    copies = [torch.empty(6, device=device), torch.empty(3, device=device)]
    opcheck_samples(distributed_adam_step, [tuple(given), (*given[:5], copies, *given[6:])])
    opcheck_samples(
        distributed_adam_peaks, [(*given[:4], None, None, None, on(device, 1.0), *given[12:])]
    )
