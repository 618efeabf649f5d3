"""FusedAdam(amsgrad=True): against float64 and torch.optim, in every mode that has it."""

import copy
import io

import pytest
import torch

from apex.optimizers import FusedAdam
from apex.optimizers.fused_adam.ops import adam_step, adam_step_capturable
from apex_testkit import FLOATS, assert_as_accurate_as
from apex_testkit.grids import HALVES
from apex_testkit.opcheck import opcheck_samples
from apex_testkit.optimizers import adam_reference, run_steps

LARGEST = "max_exp_avg_sq"
SIZES = {"odd": [1, 7, 1023], "empty": [0, 5], "scalar": [()], "many": [3] * 200, "large": [70_001]}
# Second moments that fall: without the maximum, parameters would differ from the first step on.
HYPER = {"lr": 1e-2, "betas": (0.9, 0.6), "weight_decay": 0.1, "amsgrad": True}
COUNTERPARTS = {
    "adamw": (torch.optim.AdamW, {"adam_w_mode": True}),
    "adam": (torch.optim.Adam, {"adam_w_mode": False}),
}
both_modes = pytest.mark.parametrize("mode", COUNTERPARTS.values(), ids=COUNTERPARTS.keys())
SMALL = {
    "float8": {"exp_avg_dtype": torch.uint8},
    "bfloat16": {"exp_avg_sq_dtype": torch.bfloat16},
    "half masters": {"master_weights": True, "master_weight_dtype": torch.float16},
    "remainders": {"master_weights": True, "store_param_remainders": True},
    "decoupled": {"use_decoupled_grad": True},
}


def falling(values, steps, seed=0):
    """Gradients of every step, each a third of those before."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [(0.3**t * torch.randn(v.shape, generator=generator)).to(v) for v in values]
        for t in range(steps)
    ]


def make(device, dtype=torch.float32, sizes=(37, 1, 300)):
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(n, generator=generator).to(device, dtype) for n in sizes]
    return values, [torch.nn.Parameter(v.clone()) for v in values]


def go_on(optimizer, grads):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for own in grads:
        for p, g in zip(params, own, strict=True):
            p.grad = g.clone()
        optimizer.step()


@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_follows_the_formula(sizes, dtype, adam_w_mode, device):
    hyper = {**HYPER, "adam_w_mode": adam_w_mode}
    values, params = make(device, dtype, sizes)
    grads = falling(values, 3)
    optimizer = run_steps(FusedAdam, params, grads, **hyper)
    for i, (p, v) in enumerate(zip(params, values, strict=True)):
        largest = optimizer.state[p][LARGEST]
        assert largest.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert largest.stride() == p.stride()
        if v.numel():
            # The parameter is rounded once in each of three steps.
            assert_as_accurate_as(
                lambda p, *g: adam_reference(p, *g, **hyper),
                p.detach(),
                v,
                *(g[i] for g in grads),
                ulps=3,
            )


@pytest.mark.parametrize(
    "options",
    [
        {"bias_correction": False},
        {"capturable": True},
        {"capturable": True, "bias_correction": False, "adam_w_mode": False},
        {"lr": torch.tensor(0.05)},
        {"lr": torch.tensor(0.05), "capturable": True},
    ],
    ids=str,
)
def test_options_follow_the_formula(options, device):
    options = {**HYPER, **options}
    values, params = make(device)
    grads = falling(values, 5)
    run_steps(FusedAdam, params, grads, **options)
    hyper = {**options, "lr": float(options["lr"])}
    for i, (p, v) in enumerate(zip(params, values, strict=True)):
        own = [g[i] for g in grads]
        assert_as_accurate_as(
            lambda p, *g: adam_reference(p, *g, **hyper), p.detach(), v, *own, ulps=5
        )


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@both_modes
def test_twenty_steps_match_torch(mode, maximize, capturable, device):
    counterpart, options = mode
    hyper = {**HYPER, "lr": 2**-7, "maximize": maximize}  # lr is float32 on the device
    values, params = make(device, torch.float64)
    _, twins = make(device, torch.float64)
    grads = falling(values, 10) + falling(values, 10, seed=1)  # which rise again
    ours = run_steps(FusedAdam, params, grads, capturable=capturable, **options, **hyper)
    theirs = run_steps(counterpart, twins, grads, **hyper)
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
        expected = theirs.state[q][LARGEST]
        torch.testing.assert_close(ours.state[p][LARGEST], expected, rtol=1e-12, atol=0)
        assert not torch.equal(expected, theirs.state[q]["exp_avg_sq"])


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_masters_are_float32_parameters_bit_for_bit(dtype, capturable, device):
    values, params = make(device, dtype)
    grads = falling(values, 4)
    options = {**HYPER, "capturable": capturable}
    masters = run_steps(FusedAdam, params, grads, master_weights=True, **options)
    wide = [torch.nn.Parameter(v.float()) for v in values]
    plain = run_steps(FusedAdam, wide, [[g.float() for g in own] for own in grads], **options)
    for p, w in zip(params, wide, strict=True):
        assert torch.equal(masters.state[p]["master_param"], w)
        assert torch.equal(masters.state[p][LARGEST], plain.state[w][LARGEST])
        assert torch.equal(p, w.to(dtype))


@pytest.mark.parametrize("capturable", [False, True])
def test_roundings_by_chance_are_neighbours_of_the_exact_step(capturable, device):
    values, params = make(device, torch.bfloat16, (20_000,))
    (grads,) = falling(values, 1)
    options = {**HYPER, "capturable": capturable}
    run_steps(FusedAdam, params, [grads], stochastic_rounding=True, **options)
    wide = [torch.nn.Parameter(v.float()) for v in values]
    run_steps(FusedAdam, wide, [[g.float() for g in grads]], **options)
    exact, rounded = wide[0].detach(), params[0].detach()
    below = (exact.view(torch.int32) >> 16).to(torch.int16)
    ups = rounded.view(torch.int16) - below
    assert set(ups.unique().tolist()) == {0, 1}
    share = (exact.view(torch.int32) & 0xFFFF).double() / 65536
    sigma = (share * (1 - share)).sum().sqrt()
    assert abs((ups - share).sum()) < 4 * sigma


@pytest.mark.parametrize("direction", ["from_torch", "to_torch"])
@both_modes
def test_checkpoints_exchange_with_torch(mode, direction, device):
    counterpart, options = mode
    values, params = make(device, torch.float64)
    grads = falling(values, 6)
    ours, theirs = FusedAdam(params, **options, **HYPER), counterpart(params, **HYPER)
    first, second = (theirs, ours) if direction == "from_torch" else (ours, theirs)
    go_on(first, grads[:3])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.param_groups[0]["amsgrad"] is True
    go_on(second, grads[3:])
    for i, (p, v) in enumerate(zip(params, values, strict=True)):
        expected = adam_reference(v, *(g[i] for g in grads), **options, **HYPER)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)


def test_a_state_decides_whether_there_is_a_maximum(device):
    """As in torch: the loaded groups' ``amsgrad`` is used."""
    values, params = make(device)
    grads = falling(values, 2)
    state = run_steps(torch.optim.AdamW, params, grads, **HYPER).state_dict()
    loaded = FusedAdam(params)
    loaded.load_state_dict(state)
    assert loaded.param_groups[0]["amsgrad"] is True
    assert all(LARGEST in loaded.state[p] for p in params)
    state = run_steps(torch.optim.AdamW, params, grads).state_dict()
    loaded = FusedAdam(params, amsgrad=True)
    loaded.load_state_dict(state)
    go_on(loaded, grads)
    assert not any(LARGEST in loaded.state[p] for p in params)


@pytest.mark.parametrize("way", ["deepcopy", "state_dict"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_continues_bit_for_bit(dtype, way, device):
    values, params = make(device, dtype)
    grads = falling(values, 6)
    options = {**HYPER, "master_weights": True}
    run_steps(FusedAdam, params, grads, **options)
    _, own = make(device, dtype)
    half = run_steps(FusedAdam, own, grads[:3], **options)
    if way == "deepcopy":
        resumed = copy.deepcopy(half)
    else:
        resumed = FusedAdam([torch.nn.Parameter(p.detach().clone()) for p in own], **options)
        resumed.load_state_dict(half.state_dict())
    go_on(resumed, grads[3:])
    for p, q in zip(params, resumed.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q)


def test_groups_may_differ_and_change(device):
    """A maximum that is missing starts with the second moment of the step."""
    values, params = make(device, torch.float64)
    grads = falling(values, 4)
    groups = [{"params": params[:1], "amsgrad": True}, {"params": params[1:]}]
    optimizer = FusedAdam(groups, **{**HYPER, "amsgrad": False})
    go_on(optimizer, grads[:2])
    assert [LARGEST in optimizer.state[p] for p in params] == [True, False, False]
    optimizer.param_groups[1]["amsgrad"] = True
    go_on(optimizer, grads[2:3])
    for p in params[1:]:
        assert torch.equal(optimizer.state[p][LARGEST], optimizer.state[p]["exp_avg_sq"])
    go_on(optimizer, grads[3:])
    for i, (p, v) in enumerate(zip(params[:1], values[:1], strict=True)):
        expected = adam_reference(v, *(g[i] for g in grads), **HYPER)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)


def test_a_nan_stays_in_the_maximum_and_inf_too(device):
    """As torch.maximum has it."""
    ends = []
    for cls in (FusedAdam, torch.optim.AdamW):
        param = torch.nn.Parameter(torch.ones(5, device=device))
        grads = [torch.ones(5, device=device) for _ in range(2)]
        grads[0][1:3] = torch.tensor([torch.nan, torch.inf])
        optimizer = run_steps(cls, [param], [[g] for g in grads], **HYPER)
        ends.append((param.detach(), optimizer.state[param][LARGEST]))
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("small", SMALL.values(), ids=SMALL.keys())
def test_small_states_have_no_maximum(small, device):
    _, params = make(device, torch.bfloat16)
    with pytest.raises(ValueError, match="amsgrad=True needs float32 moments and masters"):
        FusedAdam(params, amsgrad=True, **small)
    optimizer = FusedAdam(params[:2], **small)
    with pytest.raises(ValueError, match="FusedAdam: amsgrad=True needs"):
        optimizer.add_param_group({"params": params[2:], "amsgrad": True})
    assert len(optimizer.param_groups) == 1
    state = FusedAdam(params[:2], amsgrad=True).state_dict()
    with pytest.raises(ValueError, match=r"FusedAdam\.load_state_dict: amsgrad=True needs"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["amsgrad"] is False
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[0]["amsgrad"] = True
    for p in params:
        p.grad = p.decoupled_grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"FusedAdam\.step: amsgrad=True needs"):
        optimizer.step()
    assert all(map(torch.equal, params, before))
    assert not optimizer.state


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("count", [3, 64], ids=["few", "held"])
def test_a_failed_step_changes_nothing(count, capturable, device):
    values, params = make(device, sizes=(5,) * count)
    grads = falling(values, 4)
    optimizer = FusedAdam(params, capturable=capturable, **HYPER)
    go_on(optimizer, grads[:3])
    before = copy.deepcopy((params, optimizer.state_dict()["state"]))
    for bad in (torch.ones(4, device=device), torch.ones(5, device=device).to_sparse()):
        for p, g in zip(params, grads[3], strict=True):
            p.grad = g.clone()
        params[1].grad.data = bad if not bad.is_sparse else params[1].grad.data
        if bad.is_sparse:
            params[1].grad = bad
        with pytest.raises(RuntimeError, match="parameter 1"):
            optimizer.step()
        after = optimizer.state_dict()["state"]
        assert all(map(torch.equal, params, before[0]))
        for index, entry in before[1].items():
            assert all(torch.equal(entry[key], after[index][key]) for key in entry)


def test_many_small_tensors_are_stepped_as_large_ones(device):
    """Their lists stay in C++ from step to step."""
    values, params = make(device, sizes=(7,) * 64)
    grads = falling(values, 5)
    run_steps(FusedAdam, params, grads, **HYPER)
    whole = torch.nn.Parameter(torch.cat(values))
    run_steps(FusedAdam, [whole], [[torch.cat(own)] for own in grads], **HYPER)
    assert torch.equal(torch.cat([p.detach() for p in params]), whole)


def lists(device, dtype=torch.float32, sizes=(5, 130)):
    """params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters."""

    def tensors():
        return [torch.randn(n, device=device, dtype=dtype) for n in sizes]

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    states = [[t.to(wide).abs() for t in tensors()] for _ in range(3)]
    return [tensors(), tensors(), *states, []]


def test_ops_pass_opcheck(device):
    hyper = (0.1, 0.9, 0.99, 1e-8, 0.01, 1, True, True)
    samples = [(*lists(device, dtype), *hyper) for dtype in (torch.float64, torch.bfloat16)]
    with_masters = lists(device, torch.bfloat16)
    with_masters[5] = [p.float() for p in with_masters[0]]
    opcheck_samples(adam_step, [*samples, (*with_masters, *hyper)])
    one = torch.ones(1, device=device)
    numbers = (one, one.int(), one * 2, one * 0, *hyper[1:5], True, False)
    clipped = (*lists(device), *numbers, False, one.double() / 2)
    opcheck_samples(adam_step_capturable, [clipped, (*with_masters, *numbers)])


def test_ops_name_what_is_wrong(device):
    hyper = (0.1, 0.9, 0.99, 1e-8, 0.01, 1, True, True)
    p, g, m, v, x, _ = lists(device)
    before = copy.deepcopy([p, m, v, x])
    with pytest.raises(RuntimeError, match=r"max_exp_avg_sqs has 1 tensors, but params has 2"):
        adam_step(p, g, m, v, x[:1], [], *hyper)
    with pytest.raises(RuntimeError, match="exp_avgs are float32, but max_exp_avg_sqs are float64"):
        adam_step(p, g, m, v, [t.double() for t in x], [], *hyper)
    with pytest.raises(RuntimeError, match=r"max_exp_avg_sqs\[1\] is \[4\] float32"):
        adam_step(p, g, m, v, [x[0], x[1][:4]], [], *hyper)
    with pytest.raises(RuntimeError, match="masters are for float16 and bfloat16 params"):
        adam_step(p, g, m, v, x, [t.clone() for t in p], *hyper)
    wide = [[t.double() for t in own] for own in (p, g)]
    with pytest.raises(RuntimeError, match="exp_avgs must be float64 for float64 params"):
        adam_step(*wide, m, v, x, [], *hyper)
    for own, old in zip([p, m, v, x], before, strict=True):
        assert all(map(torch.equal, own, old))
