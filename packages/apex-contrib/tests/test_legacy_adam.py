"""Apex's first Adam, its operators and its extension module against a float64 oracle."""

import copy
import math

import fused_adam_cuda
import pytest
import torch

from apex.contrib.optimizers import FusedAdam, FusedLAMB
from apex.contrib.optimizers.legacy_adam import cast_unless, scaled_adam_step, scaled_adam_undo
from apex_testkit import FLOATS, HALVES, assert_as_accurate_as, opcheck_samples

NUMBERS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "decay": 0.1, "scale": 4.0}
SIZES = (5, 0, 130, 1000)


def oracle(p, g, m, v, step=3, inside=False, corrects=True, **changes):
    """One step of the documented formula, in the dtype of its inputs: new p, m and v."""
    n = {**NUMBERS, **changes}
    g = g / n["scale"]
    m = n["beta1"] * m + (1 - n["beta1"]) * g
    v = n["beta2"] * v + (1 - n["beta2"]) * g * g
    root = (v + n["eps"]).sqrt() if inside else v.sqrt() + n["eps"]
    rate = n["lr"]
    if corrects:
        rate *= math.sqrt(1 - n["beta2"] ** step) / (1 - n["beta1"] ** step)
    return p - rate * (m / root + n["decay"] * p), m, v


def tensors(device, dtype=torch.float32, sizes=SIZES):
    def make():
        return [torch.randn(n, device=device).to(dtype) for n in sizes]

    return make(), make(), make(), [v.abs() for v in make()]


def high_bytes(x):
    """The upper bytes of float16 numbers."""
    return (x.half().view(torch.int16) >> 8).to(torch.uint8)


def of_high_bytes(x):
    return (x.to(torch.int16) << 8).view(torch.float16).float()


def numbers(step=3, inside=False, corrects=True):
    return (*NUMBERS.values(), None, step, corrects, inside)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_step_is_as_accurate_as_plain(dtype, inside, device):
    p, g, m, v = tensors(device, dtype, (5, 0, 130, 9001))  # more than a GPU's block takes
    before = [[t.clone() for t in row] for row in zip(p, g, m, v, strict=True)]
    scaled_adam_step(p, g, m, v, [], *numbers(inside=inside, corrects=not inside))
    for row, *after in zip(before, p, m, v, strict=True):
        assert_as_accurate_as(
            lambda *row: oracle(*row, inside=inside, corrects=not inside), after, *row
        )


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES, torch.uint8], ids=str)
def test_copies_and_the_scale_on_the_device(dtype, device):
    p, _, m, v = tensors(device)
    g = [t.bfloat16() for t in tensors(device)[0]]
    row = [t.clone() for t in (p[3], g[3].float(), m[3], v[3])]
    copies = [torch.zeros_like(t, dtype=dtype) for t in p]
    scale = torch.tensor([8.0], device=device)
    hyper = list(numbers())
    hyper[5:7] = [1.0, scale]
    scaled_adam_step(p, g, m, v, copies, *hyper)
    assert_as_accurate_as(lambda *row: oracle(*row, scale=8.0)[0], p[3], *row)
    expected = high_bytes(p[3]) if dtype == torch.uint8 else p[3].to(dtype)
    assert torch.equal(copies[3], expected)


def test_elements_without_finite_gradient_are_left_out_and_steps_are_undone(device):
    before = tensors(device, sizes=(1000,))
    before[1][0][[0, 7, 999]] = torch.tensor([math.inf, -math.inf, math.nan], device=device)
    p, g, m, v = ([t.clone() for t in own] for own in before)
    overflow = torch.zeros(1, dtype=torch.int32, device=device)
    scaled_adam_step(p, g, m, v, [], *numbers(), overflow)
    assert overflow.item() == 1
    is_bad = ~g[0].isfinite()
    for old, new in zip((before[0], before[2], before[3]), (p, m, v), strict=True):
        assert torch.equal((old[0] == new[0]).nonzero(), is_bad.nonzero())
    given = [*numbers()[:6], *numbers()[7:]]
    scaled_adam_undo(p, g, m, v, 1 - overflow, *given)
    assert (p[0] != before[0][0]).any()  # the flag was 0
    scaled_adam_undo(p, g, m, v, overflow, *given)
    for old, new in zip((before[0], before[2], before[3]), (p, m, v), strict=True):
        torch.testing.assert_close(new[0], old[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="betas of 0"):
        scaled_adam_undo(p, g, m, v, overflow, 0.1, 0.0, *given[2:])


def test_without_overflow_flag_a_nan_spreads(device):
    p, g, m, v = tensors(device, sizes=(70,))
    g[0][3] = math.nan
    scaled_adam_step(p, g, m, v, [], *numbers())
    assert p[0].isnan().nonzero().tolist() == m[0].isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("to", [torch.float32, *HALVES, torch.uint8], ids=str)
@pytest.mark.parametrize("of", [torch.float32, *HALVES, torch.uint8], ids=str)
def test_casts(of, to, device):
    special = torch.tensor([0.0, -0.0, 1e-7, 6e-5, 1.3, -1.75, 6e4, math.inf, -math.inf, math.nan])
    x = torch.cat([torch.randn(300), special]).to(device)
    given = high_bytes(x) if of == torch.uint8 else x.to(of)
    value = of_high_bytes(given) if of == torch.uint8 else given.float()
    expected = high_bytes(value) if to == torch.uint8 else value.to(to)
    out = torch.zeros_like(expected)
    flag = torch.ones(1, dtype=torch.int32, device=device)
    fused_adam_cuda.maybe_cast(flag, given, out)
    assert not out.any()
    fused_adam_cuda.maybe_cast_mt(33, 0 * flag, [[given, given[:0]], [out, out[:0]]])
    wide, want = (of_high_bytes(t) if t.dtype == torch.uint8 else t for t in (out, expected))
    torch.testing.assert_close(wide, want, rtol=0, atol=0, equal_nan=True)


def test_sampled_checks(device):
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    x = torch.zeros(100, device=device)
    x[50] = math.inf
    cases = ((x, 3, 0), (x, 5, 1), (high_bytes(x), 25, 1), (high_bytes(x), 3, 0))
    for tensor, stride, expected in cases:
        fused_adam_cuda.strided_check_finite(flag, tensor, stride, 1)
        assert flag.item() == expected
    flag.fill_(1)
    fused_adam_cuda.strided_check_finite(flag, x, 3, 0)
    assert flag.item() == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8], ids=str)
def test_raw_calls(dtype, device):
    (p,), (g,), (m,), (v,) = tensors(device, sizes=(70,))
    n = NUMBERS
    given = (n["lr"], n["beta1"], n["beta2"], n["eps"], n["scale"], 3, 0, 1, n["decay"])
    row = [t.clone() for t in (p, g, m, v)]
    p_copy = torch.zeros_like(p, dtype=dtype)
    lists = [[t.clone()] for t in (p, m, v, g)]
    fused_adam_cuda.adam(p, p_copy, m, v, g, *given)
    assert_as_accurate_as(lambda *row: oracle(*row, inside=True), [p, m, v], *row)
    copied = [[torch.zeros_like(p_copy)]]
    off = torch.zeros(1, dtype=torch.int32, device=device)
    fused_adam_cuda.adam_mt(7, off + 1, [*lists, *copied], *given)
    assert torch.equal(lists[0][0], row[0])
    fused_adam_cuda.adam_mt(7, off, [*lists, *copied], *given)
    assert torch.equal(lists[0][0], p)
    assert torch.equal(copied[0][0], p_copy)

    q, r, s = (t.clone() for t in (row[0], row[2], row[3]))
    g[9] = math.nan
    fused_adam_cuda.reversible_adam(q, p_copy, r, s, g, *given)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    fused_adam_cuda.strided_check_finite(flag, p_copy, 70, 1)
    assert flag.item() == 1
    assert q[9] == row[0][9]
    fused_adam_cuda.maybe_adam_undo(flag, q, r, s, g, *given)
    torch.testing.assert_close(q, row[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="mode must be 0"):
        fused_adam_cuda.adam(p, p_copy, m, v, g, *given[:6], 2, *given[7:])
    with pytest.raises(RuntimeError, match="depth: expected lists of p, m, v, g, p_copy"):
        fused_adam_cuda.adam_mt(7, off, lists[:3], *given)


def test_ops_pass_opcheck(device):
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    p, g, m, v = tensors(device)
    opcheck_samples(
        scaled_adam_step,
        [
            (p, g, m, v, [], *numbers()),
            (p, g, m, v, [t.half() for t in p], *numbers(), flag, flag),
        ],
    )
    opcheck_samples(scaled_adam_undo, [(p, g, m, v, flag, *numbers()[:6], *numbers()[7:])])
    opcheck_samples(cast_unless, [(p, [t.half() for t in p], flag)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"g": lambda t: t.double()}, "grads must be float32, float16 or bfloat16"),
        ({"m": lambda t: t[1:]}, "size mismatch"),
        ({"c": lambda t: t.int()}, "copies must be float32, float16 or bfloat16"),
    ],
)
def test_lists_that_do_not_match(change, message, device):
    lists = dict(zip("pgmv", tensors(device, sizes=(70,)), strict=True), c=[])
    lists["c"] = [lists["p"][0].half()]
    before = [t.clone() for own in lists.values() for t in own]
    for key, spoil in change.items():
        lists[key] = [spoil(t) for t in lists[key]]
    with pytest.raises(RuntimeError, match=message):
        scaled_adam_step(*lists.values(), *numbers())
    assert torch.equal(lists["p"][0], before[0])


# The class.


def train(optimizer, params, all_grads, scale, **options):
    for grads in all_grads:
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else (grad * scale).to(param.dtype)
        optimizer.step(scale=scale, **options)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_class_against_float64(dtype, inside, device):
    start = [torch.randn(n, device=device).to(dtype) for n in ((3, 5), (70,), (0,))]
    grads = [[torch.randn_like(p) for p in start] for _ in range(3)]
    grads[1][0] = None  # a parameter that this step leaves out

    def plain(start, grads):
        results = []
        for i, p in enumerate(start):
            m, v, step = torch.zeros_like(p), torch.zeros_like(p), 0
            for own in grads:
                if own[i] is not None:
                    step += 1
                    p, m, v = oracle(p, own[i], m, v, step, inside, scale=1.0)
                    p = p.to(dtype).to(m.dtype)
            results.append(p)
        return results

    params = [p.clone().requires_grad_() for p in start]
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1}
    optimizer = FusedAdam(params, eps_inside_sqrt=inside, use_mt=True, **options)
    train(optimizer, params, grads, 16.0)
    # Parameters and moments are rounded at each of three steps.
    assert_as_accurate_as(plain, [p.detach() for p in params], start, grads, ulps=4)
    assert [optimizer.state[p]["step"] for p in params] == [2, 3, 3]


@pytest.mark.parametrize("given", ["host", "device", "computed"])
def test_clipping(given, device):
    start = torch.randn(70, device=device)
    grad = torch.randn(70, device=device)
    param = start.clone().requires_grad_()
    optimizer = FusedAdam([param], lr=0.1, betas=(0.9, 0.99), eps=1e-3, max_grad_norm=0.5)
    param.grad = grad * 4
    norm = param.grad.norm()
    norms = {"host": [norm.item()], "device": [norm], "computed": None}[given]
    optimizer.step(scale=4.0, grad_norms=norms)

    def plain(p, g):
        clip = (g.square().sum().sqrt() + 1e-6) / 0.5
        zero = torch.zeros_like(p)
        return oracle(p, g / clip, zero, zero, 1, scale=1.0, decay=0.0)[0]

    assert_as_accurate_as(plain, param.detach(), start, grad)


@pytest.mark.parametrize("form", ["generator", "flat", "nested"])
def test_given_gradients_and_outputs(form, device):
    masters = [torch.randn(n, device=device) for n in (3, 70)]
    grads = [p.half() for p in masters]
    outputs = [torch.zeros_like(g) for g in grads]
    optimizer = FusedAdam(masters, lr=0.1)
    expected = FusedAdam([p.clone() for p in masters], lr=0.1)
    for p, g in zip(expected.param_groups[0]["params"], grads, strict=True):
        p.grad = g.float()
    expected.step()
    forms = {
        "generator": lambda ts: (t for t in ts),
        "flat": list,
        "nested": lambda ts: [list(ts)],
    }
    optimizer.step(grads=forms[form](grads), output_params=forms[form](outputs))
    for p, output, want in zip(masters, outputs, expected.param_groups[0]["params"], strict=True):
        assert torch.equal(p, want)
        assert torch.equal(output, want.half())
    again = FusedAdam([p.clone() for p in masters], lr=0.3)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert again.param_groups[0]["lr"] == 0.1
    for opt in (optimizer, again):
        opt.step(grads=grads)
    ours, theirs = (opt.param_groups[0]["params"] for opt in (optimizer, again))
    assert all(map(torch.equal, ours, theirs))


def test_bad_input(device):
    p = torch.randn(5, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="amsgrad"):
        FusedAdam([p], amsgrad=True)
    for name, value in (("lr", -1), ("betas", (1.0, 0.9)), ("max_grad_norm", math.nan)):
        with pytest.raises(ValueError, match=name):
            FusedAdam([p], **{name: value})
    with pytest.raises(TypeError, match=r"lr of a group must be a number, got '1e-3'\. It is"):
        FusedAdam([p], lr="1e-3")
    with pytest.raises(RuntimeError, match="use_mt=True needs all parameters on one device"):
        FusedAdam([p, torch.zeros(2, device="meta", requires_grad=True)], use_mt=True)
    optimizer = FusedAdam([p])
    before = p.detach().clone()
    good = torch.ones_like(p)
    for options, message in (
        ({"grads": [good, good]}, "grads must have one list per group, of lengths"),
        ({"grads": [good.to_sparse()]}, "a gradient is sparse"),
        ({"grads": [good[1:]]}, "a gradient is"),
        ({"grads": [good], "output_params": [good[1:]]}, "an output parameter is"),
        ({"grads": [good], "output_params": [good.int()]}, "output parameters must be"),
        ({"grads": [good], "grad_norms": [1.0, 2.0]}, "grad_norms must have one number per group"),
    ):
        with pytest.raises(RuntimeError, match=message):
            optimizer.step(**options)
        assert torch.equal(p.detach(), before)
    assert optimizer.step(lambda: 3) == 3  # no gradient: nothing to do


@pytest.mark.parametrize("optimizer_class", [FusedAdam, FusedLAMB])
def test_compilers_call_a_step(optimizer_class, device):
    """Instead of tracing it: it is one launch already, and its counts would compile anew."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    params = [torch.nn.Parameter(torch.ones(n, device=device)) for n in SIZES]
    again = copy.deepcopy(params)
    optimizer, other = optimizer_class(params), optimizer_class(again)
    torch.compiler.reset()
    for step in (optimizer.step, torch.compile(lambda: other.step(), backend=backend)):
        torch.manual_seed(0)
        for _ in range(3):
            for param in params if step == optimizer.step else again:
                param.grad = torch.randn_like(param)
            step()
    assert graphs == []
    assert all(map(torch.equal, params, again))
    assert not torch.equal(params[0], torch.ones_like(params[0]))
