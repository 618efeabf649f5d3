"""amp_C's LAMB functions: positional signatures, flags, chunk sizes, dtypes."""

import amp_C
import pytest
import torch

from apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from apex_testkit import FLOATS, assert_as_accurate_as
from apex_testkit.grids import HALVES
from apex_testkit.optimizers_lamb import lamb_reference

SIZES = [0, 1, 65, 1023, 5_003]
CHUNKS = [2048 * 32, 333, 1]
BETAS, EPS, DECAY, LR = (0.9, 0.99), 1e-6, 0.1, 2**-6


def make(device, dtype=torch.float32, steps=None):
    if steps is not None:
        return [make(device, dtype) for _ in range(steps)]
    return [torch.randn(n, device=device).to(dtype) for n in SIZES]


def clones(tensors, dtype=None):
    return [t.to(dtype or t.dtype, copy=True) for t in tensors]


def zeros(tensors, dtype=None):
    return [torch.zeros_like(t, dtype=dtype) for t in tensors]


def flag(device, value=0):
    return torch.tensor([value], dtype=torch.int32, device=device)


def norm_of(grads):
    norm, _ = amp_C.multi_tensor_l2norm(65536, flag(grads[0].device), [grads])
    return norm


def all_equal(a, b):
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize("mode", [0, 1], ids=["l2", "decoupled"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("own_moments", [False, True], ids=["wide_moments", "own_moments"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_lamb(dtype, own_moments, max_grad_norm, mode, device):
    # A second moment in float16 may round to 0: after that, steps differ from the formula.
    steps = 1 if own_moments and dtype in HALVES else 2
    start, history = make(device, dtype), make(device, dtype, steps=steps)
    params = clones(start)
    moments = [zeros(params, None if own_moments else torch.float32) for _ in range(2)]
    for step, grads in enumerate(history, start=1):
        before = clones(grads)
        args = (LR, *BETAS, EPS, step, 1, DECAY, 1, mode, norm_of(grads), max_grad_norm, False)
        lists = [grads, params, *moments]
        # The flag is not looked at.
        multi_tensor_applier(amp_C.multi_tensor_lamb, flag(device, 1), lists, *args)
        assert all_equal(grads, before)
    hyper = {"lr": LR, "betas": BETAS, "weight_decay": DECAY, "max_grad_norm": max_grad_norm}
    expected = lamb_reference(start, *history, adam_w_mode=mode == 1, **hyper)
    if dtype == torch.float64 and not own_moments:  # rounded to float32 between the steps
        for p, e in zip(params, expected, strict=True):
            torch.testing.assert_close(p, e, rtol=1e-6, atol=1e-6)
    else:
        # Rounded once in each of two steps.
        assert_as_accurate_as(
            lambda p, *g: lamb_reference(p, *g, adam_w_mode=mode == 1, **hyper),
            params,
            start,
            *history,
            ulps=2,
        )


@pytest.mark.parametrize("use_nvlamb", [None, False, True])
def test_lamb_without_decay_and_averaging(use_nvlamb, device):
    start, grads = make(device, torch.float64), make(device, torch.float64)
    hyper = {"weight_decay": 0.0, "grad_averaging": False, "bias_correction": False}
    expected = lamb_reference(
        start, grads, lr=LR, betas=BETAS, max_grad_norm=0.0, use_nvlamb=bool(use_nvlamb), **hyper
    )
    results = []
    for chunk in CHUNKS:
        params = clones(start)
        lists = [grads, params, zeros(params), zeros(params)]
        args = (LR, *BETAS, EPS, 1, 0, 0.0, 0, 1, norm_of(grads), 0.0)
        args = args if use_nvlamb is None else (*args, use_nvlamb)
        MultiTensorApply(chunk)(amp_C.multi_tensor_lamb, flag(device), lists, *args)
        results.append(params)
        for p, e in zip(params, expected, strict=True):
            torch.testing.assert_close(p, e)
    assert all_equal(results[0], results[1])
    assert all_equal(results[0], results[2])


def mp_numbers(device, grads, scale, norm_type=None):
    """Arguments after the lists, as float32 tensors on the device."""

    def number(value):
        return torch.tensor([value], device=device)

    step = flag(device, 1)
    norm = norm_of(grads)
    norm = norm.to(norm_type or norm.dtype)
    front = (number(LR), *BETAS, EPS, step, 1, DECAY, 1, 1, norm, number(1.0 * scale), False)
    return front, number(1 / scale)


# (gradients, parameters, copies)
MP_DTYPES = [
    *((d, d, None) for d in FLOATS),
    *((d, torch.float32, d) for d in HALVES),
    *((torch.float32, torch.float32, d) for d in HALVES),
]


@pytest.mark.parametrize("dtypes", MP_DTYPES, ids=str)
def test_lamb_mp(dtypes, device):
    scale = 256.0
    start, grads = make(device, dtypes[1]), make(device, dtypes[0])
    scaled = [g * scale for g in grads]
    params, before = clones(start), clones(scaled)
    copies = [zeros(params, dtypes[2])] if dtypes[2] else []
    lists = [scaled, params, zeros(params), zeros(params), *copies]
    front, inv_scale = mp_numbers(device, scaled, scale)
    found = torch.zeros((), device=device)
    op = amp_C.multi_tensor_lamb_mp
    for noop, found_inf in ((1, found), (0, found + 1), (0, flag(device, 1))):
        multi_tensor_applier(op, flag(device, noop), lists, *front, found_inf, inv_scale)
        assert all_equal(params, start)
        assert not any(t.any() for tensors in lists[2:] for t in tensors)
    multi_tensor_applier(op, flag(device), lists, *front, found, inv_scale)
    assert all_equal(scaled, before)
    hyper = {"lr": LR, "betas": BETAS, "weight_decay": DECAY}
    assert_as_accurate_as(
        lambda p, g: lamb_reference(p, g, **hyper), params, start, clones(grads, dtypes[1])
    )
    if copies:
        assert all_equal(copies[0], [p.to(dtypes[2]) for p in params])


@pytest.mark.parametrize("norm_type", [torch.float32, torch.float64], ids=str)
def test_lamb_mp_with_a_wide_norm_and_a_flag_tensor_of_any_shape(norm_type, device):
    start, grads = make(device), make(device)
    params = clones(start)
    front, inv_scale = mp_numbers(device, grads, 1.0, norm_type)
    lists = [grads, params, zeros(params), zeros(params)]
    noop = flag(device).reshape(1, 1)
    amp_C.multi_tensor_lamb_mp(65536, noop, lists, *front, inv_scale * 0, inv_scale)
    hyper = {"lr": LR, "betas": BETAS, "weight_decay": DECAY}
    assert_as_accurate_as(lambda p, g: lamb_reference(p, g, **hyper), params, start, grads)


@pytest.mark.parametrize("wide_updates", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_stages(dtype, wide_updates, device):
    """Two steps in stages are two steps of LAMB; ``step`` counts those before."""
    start, history = make(device, dtype), make(device, dtype, steps=2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    params = clones(start)
    updates = zeros(params, wide if wide_updates else None)
    moments = [zeros(params, wide) for _ in range(2)]
    decays = torch.full((len(params),), 0.125, device=device)
    for step, grads in enumerate(history):
        before = clones([*grads, *params])
        norm = norm_of(grads).cpu()  # as Apex wants it
        multi_tensor_applier(
            amp_C.multi_tensor_lamb_stage1_cuda,
            flag(device),
            [grads, params, *moments, updates],
            *(decays, step, *BETAS, EPS, norm, 1.0),
        )
        assert all_equal([*grads, *params], before)
        norms = [
            multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(device), [tensors], True)[1]
            for tensors in (params, updates)
        ]
        args = (*norms, LR, 0.125, *((False,) if step else ()))
        multi_tensor_applier(
            amp_C.multi_tensor_lamb_stage2_cuda, flag(device), [params, updates], *args
        )
    hyper = {"lr": LR, "betas": BETAS, "weight_decay": 0.125}
    # The parameter is rounded once in each of two steps.
    assert_as_accurate_as(
        lambda p, *g: lamb_reference(p, *g, **hyper), params, start, *history, ulps=2
    )


def test_stage1_has_a_decay_for_each_tensor(device):
    """Tensors without elements have one, too."""
    params, grads = make(device, torch.float64), make(device, torch.float64)
    decays = torch.arange(len(params), device=device, dtype=torch.float32)
    updates = [zeros(params) for _ in range(2)]
    for own, decay in zip(updates, (decays, decays * 0), strict=True):
        lists = [grads, params, zeros(params), zeros(params), own]
        args = (decay, 0, *BETAS, EPS, norm_of(grads), 0.0)
        amp_C.multi_tensor_lamb_stage1_cuda(65536, flag(device), lists, *args)
    for i, (p, u, plain) in enumerate(zip(params, *updates, strict=True)):
        torch.testing.assert_close(u, plain + i * p)


@pytest.mark.parametrize(("weight_decay", "use_nvlamb"), [(0.0, True), (0.1, False), (0.0, False)])
def test_stage2_applies_the_ratio_where_it_should(weight_decay, use_nvlamb, device):
    params, updates = make(device, torch.float64), make(device, torch.float64)
    start = clones(params)
    param_norms = torch.tensor([1.0, 2.0, 3.0, 0.0, 5.0], device=device)
    update_norms = torch.tensor([1.0, 4.0, 0.0, 2.0, 2.0], device=device)
    args = (param_norms, update_norms, LR, weight_decay, use_nvlamb)
    amp_C.multi_tensor_lamb_stage2_cuda(65536, flag(device), [params, updates], *args)
    ratios = [1.0, 0.5, 1.0, 1.0, 2.5] if weight_decay or use_nvlamb else [1.0] * 5
    for p, s, u, ratio in zip(params, start, updates, ratios, strict=True):
        torch.testing.assert_close(p, s - LR * ratio * u)


def test_empty_lists_do_nothing(device):
    noop, one = flag(device), torch.ones(1, device=device)
    numbers = (LR, *BETAS, EPS, 1, 1, DECAY, 1, 1, one, 1.0)
    amp_C.multi_tensor_lamb(65536, noop, [[]] * 4, *numbers)
    for depth in (4, 5):
        amp_C.multi_tensor_lamb_mp(65536, noop, [[]] * depth, *numbers, False, one, one)
    stage1 = (one[:0], 0, *BETAS, EPS, one, 1.0)
    amp_C.multi_tensor_lamb_stage1_cuda(65536, noop, [[]] * 5, *stage1)
    amp_C.multi_tensor_lamb_stage2_cuda(65536, noop, [[]] * 2, one[:0], one[:0], LR, DECAY)
    assert noop.item() == 0


def test_texts_of_errors(device):
    xs, noop, one = make(device), flag(device), torch.ones(1, device=device)
    numbers = (LR, *BETAS, EPS, 1, 1, DECAY, 1)
    with pytest.raises(RuntimeError, match="mode must be 0"):
        amp_C.multi_tensor_lamb(1, noop, [xs] * 4, *numbers, 2, one, 1.0)
    with pytest.raises(RuntimeError, match=r"size\(\) != depth: expected 4 lists .*, got 3"):
        amp_C.multi_tensor_lamb(1, noop, [xs] * 3, *numbers, 1, one, 1.0)
    with pytest.raises(RuntimeError, match="Size mismatch among tensor lists"):
        amp_C.multi_tensor_lamb_mp(
            1, noop, [xs, xs[1:], xs, xs], *numbers, 1, one, one, False, one, one
        )
    with pytest.raises(RuntimeError, match="params are float32, but grads are float16"):
        amp_C.multi_tensor_lamb(1, noop, [clones(xs, torch.half), *[xs] * 3], *numbers, 1, one, 1.0)
