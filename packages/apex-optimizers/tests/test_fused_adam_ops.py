"""The adam_step operators as citizens of torch: opcheck, torch.compile, messages."""

import copy

import pytest
import torch

from apex.optimizers.fused_adam.ops import adam_step, adam_step_capturable
from apex_testkit.opcheck import opcheck_samples


def lists(device, dtype=torch.float32, sizes=(5, 130)):
    def make():
        return [torch.randn(n, device=device, dtype=dtype) for n in sizes]

    states = [[t.float().abs() for t in make()] for _ in range(2)]
    return [make(), make(), *states, [], []]


def test_ops_pass_opcheck(device):
    hyper = (0.1, 0.9, 0.99, 1e-8, 0.01, 1, True, True)
    samples = [(*lists(device, dtype), *hyper) for dtype in (torch.float32, torch.bfloat16)]
    with_masters = lists(device, torch.bfloat16)
    with_masters[5] = [p.float() for p in with_masters[0]]
    opcheck_samples(adam_step, [*samples, (*with_masters, *hyper)])

    scalars = [torch.ones(1, device=device) for _ in range(3)]
    step = torch.ones(1, dtype=torch.int32, device=device)
    capturable = (scalars[0], step, scalars[1], scalars[2] * 0, *hyper[1:5], True, False)
    opcheck_samples(
        adam_step_capturable,
        [
            (*lists(device), *capturable),
            (*lists(device), scalars[0], step, None, None, *hyper[1:5], True, True),
        ],
    )


def test_step_op_compiles_into_one_graph(device):
    hyper = (0.1, 0.9, 0.99, 1e-8, 0.0, 1, True, True)

    def update(params, grads, exp_avgs, exp_avg_sqs):
        adam_step(params, grads, exp_avgs, exp_avg_sqs, [], [], *hyper)
        return [p * 2 for p in params]

    eager = lists(device)[:4]
    compiled = copy.deepcopy(eager)
    expected = update(*eager)
    actual = torch.compile(update, fullgraph=True)(*compiled)
    for a, b in zip(expected + eager[0], actual + compiled[0], strict=True):
        assert torch.equal(a, b)


def test_op_names_the_mismatched_tensor(device):
    p, g, m, v, *_ = lists(device)
    hyper = ([], [], 0.1, 0.9, 0.99, 1e-8, 0.01, 1, True, True)
    with pytest.raises(RuntimeError, match=r"grads\[1\] is \[4\] float32"):
        adam_step(p, [g[0], g[1][:4]], m, v, *hyper)
    with pytest.raises(RuntimeError, match="params are float32, but grads are float64"):
        adam_step(p, [t.double() for t in g], m, v, *hyper)
    with pytest.raises(RuntimeError, match="exp_avgs has 1 tensors, but params has 2"):
        adam_step(p, g, m[:1], v, *hyper)
    with pytest.raises(RuntimeError, match="exp_avgs must be float32"):
        adam_step(p, g, [t.double() for t in m], [t.double() for t in v], *hyper)
    with pytest.raises(RuntimeError, match="exp_avg_sqs are float64"):
        adam_step(p, g, m, [t.double() for t in v], *hyper)
    meta = [t.to("meta") for t in p]
    assert adam_step(meta, meta, meta, meta, *hyper) is None  # shapes only: nothing to do


@pytest.mark.parametrize("bad", ["empty", "two", "dtype"])
@pytest.mark.parametrize("name", ["lr", "step", "inv_scale", "found_inf"])
def test_capturable_op_checks_its_numbers_before_it_writes(name, bad, device):
    own = lists(device)
    before = copy.deepcopy(own)
    numbers = {
        "lr": torch.ones(1, device=device),
        "step": torch.ones(1, dtype=torch.int32, device=device),
        "inv_scale": torch.ones(1, device=device),
        "found_inf": torch.zeros(1, device=device),
    }
    good = numbers[name]
    numbers[name] = {"empty": good[:0], "two": good.expand(2), "dtype": good.double()}[bad]
    with pytest.raises(RuntimeError, match=f"adam_step_capturable: {name} must be one"):
        adam_step_capturable(*own, *numbers.values(), 0.9, 0.99, 1e-8, 0.01, True, True)
    for now, then in zip(own, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(now, then, strict=True))
