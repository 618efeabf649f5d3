"""FusedAdamSWA and its operator against torch.optim's Adam and plain averages, in float64."""

import copy
import inspect
import io
import math
from fractions import Fraction

import pytest
import torch

from apex.contrib.openfold_triton.adam_swa import adam_swa_step
from apex.contrib.openfold_triton.fused_adam_swa import AdamMathType, FusedAdamSWA
from apex_testkit import HALVES, LARGE, assert_as_accurate_as, opcheck_samples

SIZES = {"odd": [1, 7, 1023], "empty": [0, 5], "large": LARGE}
NUMBERS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
STORED = [torch.float32, *HALVES]


# The operator.


def adam(p, g, m, v, average, *, weight=0.1, scale=1.0, step=3, decoupled=True):
    """New parameter, exp_avg, exp_avg_sq, copy and average; the oracle."""
    beta1, beta2 = NUMBERS["betas"]
    decay = NUMBERS["weight_decay"] * p
    g = g * scale if decoupled else g * scale + decay
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + NUMBERS["eps"])
    p = p - NUMBERS["lr"] * (update + decay if decoupled else update)
    return p, m, v, p, average + weight * (p - average)


def numbers(*, weight=0.1, scale=1.0, device_scale=None, step=3, decoupled=True):
    lr, betas, eps, decay = NUMBERS.values()
    return (device_scale, scale, lr, *betas, eps, decay, step, True, decoupled, weight)


def make(sizes, device, state=torch.float32, copied=torch.bfloat16):
    """Lists of parameters, gradients, moments, copies and averages."""
    dtypes = (state, copied, state, state, copied, state)
    lists = [[torch.randn(n, device=device).to(dtype) for n in sizes] for dtype in dtypes]
    lists[3] = [v.abs() for v in lists[3]]
    return lists


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("copied", [torch.float64, *STORED], ids=str)
def test_step_is_as_accurate_as_plain(copied, sizes, decoupled, device):
    state = torch.float64 if copied == torch.float64 else torch.float32
    before = make(sizes, device, state, copied)
    lists = [[t.clone() for t in own] for own in before]
    adam_swa_step(*lists, *numbers(scale=0.5, decoupled=decoupled))
    for i, (p, g, m, v, _, average) in enumerate(zip(*before, strict=True)):
        assert torch.equal(lists[1][i], g)
        if p.numel():
            assert_as_accurate_as(
                lambda *row: adam(*row, scale=0.5, decoupled=decoupled),
                [lists[k][i] for k in (0, 2, 3, 4, 5)],
                *(p, g, m, v, average),
                ulps=4 if state == torch.float64 else 1,  # truth rounds as often
            )
        assert torch.equal(lists[4][i], lists[0][i].to(copied))


def test_a_weight_of_one_begins_the_average(device):
    lists = make([70, 3], device)
    lists[5] = [torch.full_like(t, math.nan) for t in lists[5]]
    adam_swa_step(*lists, *numbers(weight=1.0))
    assert all(map(torch.equal, lists[5], lists[0]))
    adam_swa_step(*lists, *numbers(weight=0.0))
    assert not any(map(torch.equal, lists[5], lists[0]))


def test_the_scale_on_the_device_is_the_same(device):
    before = make([70, 3], device)
    scale = torch.tensor([0.3], dtype=torch.float64, device=device)
    results = []
    for given in ({"scale": 0.3}, {"device_scale": scale}):
        lists = [[t.clone() for t in own] for own in before]
        adam_swa_step(*lists, *numbers(**given))
        results.append([t for own in lists for t in own])
    assert all(map(torch.equal, *results))


def test_infinite_and_missing_numbers_reach_all(device):
    lists = make([70], device)
    lists[1][0][[3, 9]] = torch.tensor([math.nan, math.inf], device=device).bfloat16()
    adam_swa_step(*lists, *numbers())
    for own in (0, 4, 5):
        assert lists[own][0].isnan().nonzero().flatten().tolist() == [3, 9]


BAD = {
    "step": ({"step": 0}, None, "step must be 1"),
    "weight": ({"weight": 1.5}, None, r"average_weight must be in \[0, 1\], got 1.5"),
    "state": ({}, (2, lambda t: t.double()), "exp_avgs must be float32, as params, got float64"),
    "params": ({}, (0, lambda t: t.half()), "params must be float32 or float64, got float16"),
    "grads": ({}, (1, lambda t: t.double()), "grads must be float32, float16 or bfloat16"),
    "copies": ({}, (4, lambda t: t.int()), "copies must be float32, float16 or bfloat16"),
    "sizes": ({}, (5, lambda t: t[1:]), "size mismatch"),
    "layout": ({}, (0, lambda t: torch.stack([t, t], 1)[:, 0]), "was not contiguous"),
}


@pytest.mark.parametrize(("given", "spoiled", "text"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_change_nothing(given, spoiled, text, device):
    lists = make([6, 3], device)
    before = [t.clone() for t in lists[3]]
    if spoiled:
        lists[spoiled[0]] = list(map(spoiled[1], lists[spoiled[0]]))
    with pytest.raises(RuntimeError, match=f"adam_swa_step: .*{text}"):
        adam_swa_step(*lists, *numbers(**given))
    assert all(map(torch.equal, lists[3], before))


def test_opcheck(device):
    scale = torch.ones(1, dtype=torch.float64, device=device)
    samples = [
        (*make([6, 0], device), *numbers()),
        (*make([6, 3], device), *numbers(device_scale=scale)),
        (*([[]] * 6), *numbers()),
    ]
    opcheck_samples(adam_swa_step, samples)


# The class.

MODES = {
    AdamMathType.ApexAdam: torch.optim.Adam,
    AdamMathType.ApexAdamW: torch.optim.AdamW,
    AdamMathType.PyTorchAdam: torch.optim.Adam,
}
SHAPES = [(3, 5), (70,), (), (0,)]


def make_lists(device, copied=torch.bfloat16, state=torch.float32, shapes=SHAPES):
    params = [torch.randn(shape, device=device).to(state) for shape in shapes]
    computes = [p.to(copied, copy=True).requires_grad_() for p in params]
    return params, computes, [torch.full_like(p, math.nan) for p in params]


def make_grads(steps, lists, missing=()):
    grads = [[torch.randn_like(c).detach() for c in lists[1]] for _ in range(steps)]
    for step, index in missing:
        grads[step][index] = None
    return grads


def train(optimizer, computes, all_grads, **options):
    for grads in all_grads:
        for compute, grad in zip(computes, grads, strict=True):
            compute.grad = None if grad is None else grad.clone()
        optimizer.step(**options)


def plain(start, all_grads, optimizer_class, decay, scale=1.0, averages=None, **numbers):
    """Parameters and averages, by torch's optimizer in the dtype of ``start``."""
    params = [p.clone().requires_grad_() for p in start]
    optimizer = optimizer_class(params, foreach=False, **numbers)
    for grads in all_grads:
        for p, g in zip(params, grads, strict=True):
            p.grad = None if g is None else g.to(p.dtype) * scale
        optimizer.step()
        new = [p.detach().clone() for p in params]
        old = averages or new
        averages = [a + (1 - decay) * (p - a) for a, p in zip(old, new, strict=True)]
    return new, averages


@pytest.mark.parametrize("scale", [None, 0.3, "tensor"], ids=str)
@pytest.mark.parametrize("copied", [torch.float64, *STORED], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_against_torch(mode, copied, scale, device):
    """Five steps, in some of which gradients are missing; averages go on all the same."""
    state = torch.float64 if copied == torch.float64 else torch.float32
    lists = make_lists(device, copied, state)
    grads = make_grads(5, lists, missing=[(0, 1), (2, 0), (4, 0)])
    start = [p.clone() for p in lists[0]]
    optimizer = FusedAdamSWA(*lists, 0.9, adam_math_mode=mode, **NUMBERS)
    factor = torch.tensor(0.3, device=device) if scale == "tensor" else scale
    train(optimizer, lists[1], grads, grad_clip_scale=factor)
    wide = [[g if g is None else g.to(state) for g in own] for own in grads]
    number = 1.0 if scale is None else float(factor) if scale == "tensor" else scale
    assert_as_accurate_as(
        lambda start, wide: plain(start, wide, MODES[mode], 0.9, number, **NUMBERS),
        (lists[0], lists[2]),
        *(start, wide),
        ulps=5 if state == torch.float64 else 1,  # truth rounds as often
    )
    assert all(torch.equal(c, p.to(copied)) for p, c in zip(lists[0], lists[1], strict=True))
    assert [optimizer.state[p]["step"] for p in lists[0]] == [3, 4, 5, 5]
    assert optimizer.param_groups[0]["step"] == 5
    assert optimizer.swa_param_groups[0]["n_averaged"] == 5
    assert [p.grad is None for p in lists[1]] == [True, False, False, False]


def test_copies_of_several_dtypes(device):
    params = [torch.randn(n, device=device) for n in (5, 70, 3)]
    computes = [p.to(d, copy=True).requires_grad_() for p, d in zip(params, STORED, strict=True)]
    averages = [torch.empty_like(p) for p in params]
    optimizer = FusedAdamSWA(params, computes, averages, 0.5)
    start, grads = [p.clone() for p in params], [torch.randn_like(c) for c in computes]
    train(optimizer, computes, [grads])
    new, _ = plain(start, [grads], torch.optim.Adam, 0.5, lr=1e-3)
    torch.testing.assert_close(params, new)
    assert all(torch.equal(c, p.to(c.dtype)) for p, c in zip(params, computes, strict=True))
    assert all(map(torch.equal, averages, params))


def test_options_and_closure(device):
    lists = make_lists(device)
    group = {"params": lists[0], "lr": 0.5}
    optimizer = FusedAdamSWA([group], *lists[1:], 0.5, bias_correction=False)
    (own,) = optimizer.param_groups
    assert (own["lr"], own["bias_correction"]) == (0.5, False)
    start = [p.clone() for p in lists[0]]

    def closure():
        assert torch.is_grad_enabled()
        loss = sum(c.square().sum() for c in lists[1])
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    for before, after, compute in zip(start, lists[0], lists[1], strict=True):
        g = compute.grad.double()
        update = 0.1 * g / ((0.001 * g * g).sqrt() + 1e-8)
        wanted = before.double() - 0.5 * update
        torch.testing.assert_close(after.double(), wanted, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        for old, new in zip(start, lists[2], strict=True):
            new.copy_(old)
    versions = [c._version for c in lists[1]]
    optimizer.step()
    assert all(c._version > v for c, v in zip(lists[1], versions, strict=True))


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_is_of_the_copies(to_none, device):
    lists = make_lists(device)
    optimizer = FusedAdamSWA(*lists, 0.5, set_grad_none=to_none)
    train(optimizer, lists[1], make_grads(1, lists))
    optimizer.zero_grad(set_to_none=False)
    assert not any(c.grad.any() for c in lists[1])
    optimizer.zero_grad()
    assert all((c.grad is None) == to_none for c in lists[1])


def test_any_layout_of_gradients(device):
    results = []
    for lay_out in (lambda t: t, lambda t: t.t().contiguous().t(), lambda t: t[:1].expand(4, 6)):
        torch.manual_seed(3)
        lists = make_lists(device, shapes=[(4, 6)])
        grad = torch.randn(1, 6, device=device).bfloat16().expand(4, 6).contiguous()
        train(FusedAdamSWA(*lists, 0.5), lists[1], [[grad]] * 1)
        lists[1][0].grad = lay_out(grad)
        optimizer = FusedAdamSWA(*lists, 0.5)
        optimizer.step()
        results.append([t for own in lists for t in own])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


# Checkpoints and copies.


def continued(optimizer, lists, grads):
    train(optimizer, lists[1], grads)
    return [t.detach().clone() for own in lists for t in own]


@pytest.mark.parametrize("form", ["state_dict", "deepcopy", "pickle"])
@pytest.mark.parametrize("state", [torch.float32, torch.float16], ids=str)
def test_goes_on_after(state, form, device):
    lists = make_lists(device, state=state)
    first, second = make_grads(3, lists, [(1, 0)]), make_grads(3, lists, [(0, 2)])
    optimizer = FusedAdamSWA(*lists, 0.9, **NUMBERS, adam_math_mode=AdamMathType.ApexAdamW)
    train(optimizer, lists[1], first)
    if form == "state_dict":
        again = copy.deepcopy(lists)
        new = FusedAdamSWA(*again, 0.9, lr=3.0, adam_math_mode=AdamMathType.ApexAdamW)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        new.load_state_dict(torch.load(file))
        assert new.swa_param_groups[0]["n_averaged"] == 3
    elif form == "deepcopy":
        new, again = copy.deepcopy((optimizer, lists))
    else:
        file = io.BytesIO()
        torch.save((optimizer, lists), file)
        file.seek(0)
        new, again = torch.load(file, weights_only=False)
    actual, expected = continued(new, again, second), continued(optimizer, lists, second)
    assert all(map(torch.equal, actual, expected))
    groups = [each.state_dict()["param_groups"][0] for each in (new, optimizer)]
    assert {key: groups[0][key] for key in groups[1]} == groups[1]


def test_a_loaded_state_is_a_copy(device):
    lists = make_lists(device)
    optimizer = FusedAdamSWA(*lists, 0.9)
    train(optimizer, lists[1], make_grads(2, lists))
    others = copy.deepcopy(lists)
    other = FusedAdamSWA(*others, 0.9)
    other.load_state_dict(optimizer.state_dict())
    before = optimizer.state[lists[0][0]]["exp_avg"].clone()
    train(other, others[1], make_grads(1, others))
    assert torch.equal(optimizer.state[lists[0][0]]["exp_avg"], before)


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("steps", [0, 3])
def test_from_optim_and_back(steps, optimizer_class, device):
    """Goes on where torch's stopped; and a state goes back."""
    start = [torch.randn(n, device=device) for n in (5, 70)]
    masters = [p.clone().requires_grad_() for p in start]
    theirs = optimizer_class(masters, **NUMBERS)
    grads = [[torch.randn_like(p) for p in start] for _ in range(steps + 2)]
    for own in grads[:steps]:
        for p, g in zip(masters, own, strict=True):
            p.grad = g
        theirs.step()
    params = [p.detach().clone() for p in masters]
    computes = [p.clone().requires_grad_() for p in params]
    averages = [torch.full_like(p, math.nan) for p in params]
    ours = FusedAdamSWA.from_optim(theirs, params, computes, averages, 0.9)
    assert ours.param_groups[0]["step"] == steps
    train(ours, computes, grads[steps:])
    for own in grads[steps:]:
        for p, g in zip(masters, own, strict=True):
            p.grad = g
        theirs.step()
    torch.testing.assert_close(params, [p.detach() for p in masters], rtol=1e-5, atol=1e-6)
    assert ours.swa_param_groups[0]["n_averaged"] == 2
    assert all(a.isfinite().all() for a in averages)
    back = optimizer_class(masters, lr=7.0)
    back.load_state_dict(copy.deepcopy(ours.state_dict()))  # torch shares what it loads
    back.step()
    ours.step()
    torch.testing.assert_close(params, [p.detach() for p in masters], rtol=1e-5, atol=1e-6)


def test_from_optim_refuses(device):
    params, computes, averages = make_lists(device, shapes=[(3,), (4,)])
    adam = torch.optim.Adam([p.requires_grad_() for p in params])
    params[0].grad = torch.ones_like(params[0])
    adam.step()
    params[1].grad = torch.ones_like(params[1])
    adam.step()
    rest = (computes, averages, 0.9)
    with pytest.raises(ValueError, match=r"different numbers of steps, \[1, 2\]"):
        FusedAdamSWA.from_optim(adam, params, *rest)
    ours = FusedAdamSWA(params, *rest)
    ours.load_state_dict(adam.state_dict())
    assert [ours.state[p]["step"] for p in params] == [2, 1]
    adam = torch.optim.Adam([{"params": params[:1]}, {"params": params[1:]}])
    with pytest.raises(RuntimeError, match="one group of parameters, got 2"):
        FusedAdamSWA.from_optim(adam, params, *rest)
    for name in ("amsgrad", "maximize"):
        adam = torch.optim.Adam(params, **{name: True})
        with pytest.raises(ValueError, match=f"{name}=True"):
            FusedAdamSWA.from_optim(adam, params, *rest)


def test_a_state_of_apex(device):
    """Which has no steps per parameter and does not count averages: each step was averaged."""
    lists = make_lists(device, shapes=[(3,), (4,)])
    optimizer = FusedAdamSWA(*lists, 0.9)
    train(optimizer, lists[1], make_grads(4, lists))
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0]["n_averaged"]
    for state in saved["state"].values():
        del state["step"]
    again = copy.deepcopy(lists)
    other = FusedAdamSWA(*again, 0.9)
    other.load_state_dict(saved)
    grads = make_grads(2, lists)
    assert all(map(torch.equal, continued(other, again, grads), continued(optimizer, lists, grads)))


SPOILED = {
    "groups": (lambda s: s["param_groups"].append(s["param_groups"][0]), "groups of"),
    "shape": (
        lambda s: s["state"][0].update(exp_avg=torch.ones(2)),
        r"'exp_avg' must have the shape of its parameter, \[3, 5\], got \[2\]",
    ),
    "moment": (lambda s: s["state"][0].pop("exp_avg_sq"), "'exp_avg_sq' must have .* got None"),
    "formula": (
        lambda s: s["param_groups"][0].update(decoupled_weight_decay=True, weight_decay=0.1),
        "torch's AdamW with weight decay, but this optimizer does not decouple",
    ),
}


@pytest.mark.parametrize(("spoil", "text"), SPOILED.values(), ids=SPOILED.keys())
def test_a_state_that_does_not_fit(spoil, text, device):
    lists = make_lists(device)
    optimizer = FusedAdamSWA(*lists, 0.9)
    train(optimizer, lists[1], make_grads(2, lists))
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=f"FusedAdamSWA.load_state_dict: .*{text}"):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]


# What is refused.


def one(dtype=torch.float32, shape=(2, 3)):
    return torch.ones(shape, dtype=dtype)


BAD_LISTS = {
    "none": (ValueError, "swa_params must be a list", [[one()], [one()], None]),
    "empty": (ValueError, "empty", [[], [], []]),
    "lengths": (ValueError, "got 1, 2 and 1", [[one()], [one(), one()], [one()]]),
    "shapes": (ValueError, "one shape", [[one()], [one(shape=(3, 2))], [one()]]),
    "average": (
        ValueError,
        "params and swa_params must have one dtype",
        [[one()], [one()], [one(torch.float64)]],
    ),
    "strides": (ValueError, "strides", [[one(shape=(3, 2)).t()], [one()], [one()]]),
    "devices": (ValueError, "on meta", [[one()], [one()], [one().to("meta")]]),
}


@pytest.mark.parametrize(("error", "text", "lists"), BAD_LISTS.values(), ids=BAD_LISTS.keys())
def test_bad_lists(error, text, lists):
    with pytest.raises(error, match=text):
        FusedAdamSWA(*lists, 0.9)


def test_bad_options(device):
    lists = make_lists(device)
    for name, value in (
        ("lr", -1.0),
        ("eps", math.nan),
        ("eps", "1e-8"),
        ("weight_decay", -1),
        ("betas", (0.9, 1.0)),
        ("adam_math_mode", "Adam"),
        ("swa_decay_rate", 1.1),
        ("swa_decay_rate", None),
    ):
        with pytest.raises(TypeError if value == "1e-8" else ValueError, match=f"SWA: {name}"):
            FusedAdamSWA(*lists, **{"swa_decay_rate": 0.9, name: value})
    optimizer = FusedAdamSWA(*lists, 0.9)
    train(optimizer, lists[1], make_grads(1, lists), grad_clip_scale=Fraction(1, 2))
    for scale, text in (("0.5", "'0.5'"), (torch.ones(2), r"a tensor \[2\]")):
        with pytest.raises(RuntimeError, match=f"a tensor of one element, got {text}"):
            optimizer.step(grad_clip_scale=scale)
    for name in ("amsgrad", "capturable", "master_weights"):
        with pytest.raises(NotImplementedError, match=f"{name}=True is not supported"):
            FusedAdamSWA(*lists, 0.9, **{name: True})
    groups = [{"params": lists[0][:1]}, {"params": lists[0][1:]}]
    with pytest.raises(RuntimeError, match="one group of parameters only"):
        FusedAdamSWA(groups, *lists[1:], 0.9)
    with pytest.raises(RuntimeError, match="one group of parameters only"):
        FusedAdamSWA(*lists, 0.9).add_param_group({"params": [one()]})
    with pytest.raises(ValueError, match=r"swa_params\[0\] is params\[0\]"):
        FusedAdamSWA(lists[0], lists[1], lists[0], 0.9)


def test_the_signature_is_apexs():
    spec = inspect.signature(FusedAdamSWA).parameters
    assert {name: p.default for name, p in spec.items() if p.default is not p.empty} == {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8,
        "adam_math_mode": AdamMathType.PyTorchAdam, "weight_decay": 0.0, "amsgrad": False,
        "set_grad_none": True, "capturable": False, "master_weights": False,
    }  # fmt: skip
    assert [(mode.name, mode.value) for mode in AdamMathType] == [
        ("ApexAdam", 0),
        ("ApexAdamW", 1),
        ("PyTorchAdam", 2),
    ]


def test_within_compiled_code(device):
    """A step is one operator already, and its counts are numbers: compilers leave it alone."""
    lists, again = make_lists(device), None
    again = copy.deepcopy(lists)
    grads = make_grads(4, lists)
    optimizer, other = FusedAdamSWA(*lists, 0.9), FusedAdamSWA(*again, 0.9)
    torch.compiler.reset()
    step = torch.compile(lambda: other.step(), backend="eager")
    for own in grads:
        for optimizer_lists in (lists, again):
            for compute, grad in zip(optimizer_lists[1], own, strict=True):
                compute.grad = grad.clone()
        optimizer.step()
        step()
    for ours, theirs in zip(lists, again, strict=True):
        assert all(map(torch.equal, ours, theirs))
