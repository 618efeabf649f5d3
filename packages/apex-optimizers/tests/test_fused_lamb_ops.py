"""lamb_step and its stages as citizens of torch: opcheck, torch.compile, numbers on the device."""

import copy

import pytest
import torch

from apex.optimizers.fused_lamb.ops import lamb_stage1, lamb_stage2, lamb_step
from apex_testkit import FLOATS, opcheck_samples
from apex_testkit.grids import HALVES

HYPER = {
    "lr": 0.1,
    "device_lr": None,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-6,
    "weight_decay": 0.1,
    "step": 2,
    "device_step": None,
    "bias_correction": True,
    "grad_averaging": True,
    "decoupled": True,
    "use_nvlamb": False,
    "maximize": False,
    "global_grad_norm": None,
    "max_grad_norm": 1.0,
    "device_max_grad_norm": None,
    "inv_scale": None,
    "found_inf": None,
    "rounding_key": None,
}


def hyper(**changes):
    return tuple({**HYPER, **changes}.values())


def lists(device, dtype=torch.float32, moment_dtype=None, sizes=(5, 0, 130)):
    def make():
        return [torch.randn(n, device=device).to(dtype) for n in sizes]

    states = [[t.to(moment_dtype or dtype).abs() for t in make()] for _ in range(2)]
    return [make(), make(), *states, []]


def on_device(device, **found_inf):
    def number(value):
        return torch.tensor([value], device=device)

    return {
        "device_lr": number(0.25),
        "device_step": torch.tensor([3], dtype=torch.int32, device=device),
        "global_grad_norm": number(8.0),
        "device_max_grad_norm": number(4.0),
        "inv_scale": number(0.5),
        "found_inf": number(found_inf.get("found_inf", 0.0)),
    }


@pytest.mark.parametrize("halves", [False, True], ids=["wide_moments", "moments_like_params"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_pass_by_pass_is_the_whole_step(dtype, halves, device):
    whole = lists(device, dtype, dtype if halves or dtype == torch.float64 else torch.float32)
    parts = copy.deepcopy(whole)
    lamb_step(*whole, *hyper())
    squares = torch.full((3, 2), -1.0, device=device, dtype=torch.float64)
    lamb_step(*parts, *hyper(), squares, 1)
    assert squares[1].tolist() == [0.0, 0.0]  # the tensor without elements
    lamb_step(*parts, *hyper(), squares, 2)
    for expected, actual in zip(whole, parts, strict=True):
        assert all(map(torch.equal, expected, actual))


def test_norms_of_several_chunks(device):
    """A chunk has 65,536 elements: a large one is alone in its chunk."""
    params, grads, firsts, seconds, _ = lists(device, torch.bfloat16, sizes=(5, 65_537))
    params[1][-1] = 1024
    moments = [[torch.zeros_like(t) for t in own] for own in (firsts, seconds)]
    squares = torch.zeros(2, 2, device=device, dtype=torch.float64)
    lamb_step(params, grads, *moments, [], *hyper(step=1), squares, 1)
    # The first step's update is the gradient's sign, and the decay.
    updates = [g.double().sign() + 0.1 * p.double() for p, g in zip(params, grads, strict=True)]
    pairs = zip(params, updates, strict=True)
    rows = [torch.stack([t.double().square().sum() for t in pair]) for pair in pairs]
    torch.testing.assert_close(squares, torch.stack(rows), rtol=2**-7, atol=0)


def test_passes_that_do_not_exist(device):
    own = lists(device)
    squares = torch.zeros(3, 2, device=device, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="only_pass 1 needs squares"):
        lamb_step(*own, *hyper(), None, 1)
    with pytest.raises(RuntimeError, match="only_pass must be 1 or 2, got 0"):
        lamb_step(*own, *hyper(), squares, 0)
    with pytest.raises(RuntimeError, match="squares must be contiguous, two numbers per tensor"):
        lamb_step(*own, *hyper(), squares[:2], 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ops_pass_opcheck(dtype, device):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    samples = [
        (*lists(device, dtype), *hyper()),
        (*lists(device, dtype, wide), *hyper(**on_device(device), decoupled=False)),
    ]
    if dtype in HALVES:
        masters, _, *moments, _ = lists(device)
        copies, grads = lists(device, dtype)[:2]
        samples.append((masters, grads, *moments, copies, *hyper()))
    squares = torch.ones(3, 2, device=device, dtype=torch.float64)
    samples += [(*lists(device, dtype), *hyper(), squares, only) for only in (1, 2)]
    opcheck_samples(lamb_step, samples)
    params, grads, m, v, _ = lists(device, dtype)
    norm = torch.ones(1, device=device)
    updates = [torch.zeros_like(p) for p in params]
    stage1 = (grads, params, m, v, updates, torch.rand(3, device=device), 0.9, 0.99, 1e-6, 1, norm)
    opcheck_samples(lamb_stage1, [(*stage1, 1.0)])
    norms = torch.rand(2, 3, device=device, dtype=torch.float64).unbind()
    opcheck_samples(lamb_stage2, [(params, updates, *norms, 0.1, 0.1, False)])


def test_step_op_compiles_into_one_graph(device):
    def update(params, grads, exp_avgs, exp_avg_sqs):
        lamb_step(params, grads, exp_avgs, exp_avg_sqs, [], *hyper())
        return [p * 2 for p in params]

    eager = lists(device)[:4]
    compiled = copy.deepcopy(eager)
    expected = update(*eager)
    actual = torch.compile(update, fullgraph=True)(*compiled)
    for a, b in zip([expected, *eager], [actual, *compiled], strict=True):
        assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_numbers_on_the_device_are_used_instead(dtype, device):
    params, grads, *rest = lists(device, dtype)
    other = copy.deepcopy([params, [g * 2 for g in grads], *rest])  # doubling is exact
    norm = torch.tensor([4.0], dtype=torch.float64, device=device)
    plain = {"lr": 0.25, "step": 3, "global_grad_norm": norm, "max_grad_norm": 2.0}
    lamb_step(params, grads, *rest, *hyper(**plain))
    lamb_step(*other, *hyper(lr=7.0, step=9, max_grad_norm=0.0, **on_device(device)))
    for ours, theirs in zip((params, *rest), (other[0], *other[2:]), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_copies_are_the_rounded_parameters(device):
    for dtype in HALVES:
        masters, _, *moments, _ = lists(device)
        copies, grads = lists(device, dtype)[:2]
        plain = copy.deepcopy([masters, [g.float() for g in grads], *moments, []])
        lamb_step(masters, grads, *moments, copies, *hyper())
        lamb_step(*plain, *hyper())
        for p, q, rounded in zip(masters, plain[0], copies, strict=True):
            assert torch.equal(p, q)
            assert torch.equal(rounded, p.to(dtype))


@pytest.mark.parametrize("found_inf", [1.0, float("inf"), float("nan")])
def test_nothing_happens_where_an_overflow_was_found(found_inf, device):
    for copies in (False, True):
        arguments = lists(device)
        if copies:
            arguments[4] = [p.bfloat16() for p in arguments[0]]
        before = copy.deepcopy(arguments)
        lamb_step(*arguments, *hyper(**on_device(device, found_inf=found_inf)))
        for now, then in zip(arguments, before, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(now, then, strict=True))


def test_op_names_what_does_not_match(device):
    p, g, m, v, _ = lists(device)
    half, double = [t.half() for t in p], [t.double() for t in p]
    before = copy.deepcopy([p, m, v])
    for arguments, message in (
        ((p, [*g[:2], g[2][:4]], m, v, []), r"size mismatch.*grads\[2\] is \[4\] float32"),
        ((p, half, m, v, []), "params are float32, but grads are float16"),
        ((p, g, m[:1], v, []), "exp_avgs has 1 tensors, but params has 3"),
        ((p, g, m, double, []), "exp_avgs are float32, but exp_avg_sqs are float64"),
        ((p, g, double, double, []), "must be float32 or of the params' dtype, float32; got"),
        ((p, g, m, v, p), "copies must be float16 or bfloat16, got float32"),
        ((p, [t.bfloat16() for t in g], m, v, half), "grads float32 or of the copies' dtype"),
        ((half, half, m, v, half), "exp_avgs and exp_avg_sqs must be float32, and grads"),
    ):
        with pytest.raises(RuntimeError, match=message):
            lamb_step(*arguments, *hyper())
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    for name, kind in (
        ("device_lr", "float32"),
        ("device_step", "int32"),
        ("global_grad_norm", "float32"),
        ("device_max_grad_norm", "float32"),
        ("inv_scale", "float32"),
        ("found_inf", "float32"),
    ):
        with pytest.raises(RuntimeError, match=f"lamb_step: {name} must be one {kind} number"):
            lamb_step(p, g, m, v, [], *hyper(**{name: wrong}))
    for now, then in zip((p, m, v), before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(now, then, strict=True))
    meta = [t.to("meta") for t in p]
    assert lamb_step(meta, meta, meta, meta, [], *hyper()) is None  # shapes only: nothing to do


def test_stages_name_what_does_not_match(device):
    p, g, m, v, _ = lists(device)
    u, one = [torch.zeros_like(t) for t in p], torch.ones(1, device=device)
    numbers = (0.9, 0.99, 1e-6, 1, one, 1.0)
    three = torch.ones(3, device=device)
    for arguments, message in (
        ((g, p, m, v, u, one), r"per_tensor_decay must hold 3 float32 numbers.*got \[1\]"),
        ((g, p, m, v, [t.half() for t in u], three), "updates must be float32 or of the params'"),
        ((g, [t.half() for t in p], m, v, u, three), "params are float16, but grads are float32"),
    ):
        with pytest.raises(RuntimeError, match=f"lamb_stage1: {message}"):
            lamb_stage1(*arguments, *numbers)
    norms = torch.ones(2, 3, device=device, dtype=torch.float64).unbind()
    for arguments, message in (
        ((p, u, norms[0][:2], norms[1]), r"param_norms must hold 3 float64 numbers.*got \[2\]"),
        ((p, u, norms[0], three), r"update_norms must hold 3 float64 numbers.*got \[3\] float32"),
        ((p, [t.half() for t in u], *norms), "updates must be float32 or of the params'"),
    ):
        with pytest.raises(RuntimeError, match=message):
            lamb_stage2(*arguments, 0.1, 0.1, False)
