"""amp_C.multi_tensor_adagrad, multi_tensor_novograd and multi_tensor_lars: the old signatures."""

import amp_C
import pytest
import torch

from apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from apex_testkit import FLOATS, HALVES, assert_as_accurate_as
from apex_testkit.optimizers_adagrad import adagrad_reference
from apex_testkit.optimizers_lars import lars_reference
from apex_testkit.optimizers_novograd import novograd_reference

SIZES = [0, 1, 65, 1023, 6_007]
CHUNKS = [2048 * 32, 333, 1]


def make(device, dtype=torch.float32):
    return [torch.randn(n, device=device).to(dtype) for n in SIZES]


def zero_flag(device):
    return torch.zeros(1, dtype=torch.int32, device=device)


def norms(device, tensors, dtype=torch.float32):
    return torch.stack([t.double().norm() for t in tensors]).to(device, dtype)


@pytest.mark.parametrize("own_dtype", [False, True], ids=["wide_state", "own_state"])
@pytest.mark.parametrize("mode", [0, 1], ids=["l2", "decoupled"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_adagrad(dtype, mode, own_dtype, device):
    params, grads = make(device, dtype), make(device, dtype)
    start, before = [p.clone() for p in params], [g.clone() for g in grads]
    wide = torch.promote_types(dtype, torch.float32)
    sums = [torch.zeros_like(p, dtype=None if own_dtype else wide) for p in params]
    flag = zero_flag(device) + 1  # which adagrad does not look at
    lists, args = [grads, params, sums], (0.1, 1e-6, mode, 0.1)
    assert multi_tensor_applier(amp_C.multi_tensor_adagrad, flag, lists, *args) is None
    hyper = {"lr": 0.1, "eps": 1e-6, "weight_decay": 0.1, "adagrad_w_mode": mode == 1}
    for p, s, g in zip(params, start, grads, strict=True):
        assert_as_accurate_as(lambda p, g: adagrad_reference(p, g, **hyper), p, s, g)
    for h, p, g in zip(sums, start, before, strict=True):
        assert_as_accurate_as(lambda p, g: (g if mode == 1 else g + 0.1 * p).square(), h, p, g)
    assert all(torch.equal(g, b) for g, b in zip(grads, before, strict=True))


@pytest.mark.parametrize("own_dtype", [False, True], ids=["wide_state", "own_state"])
@pytest.mark.parametrize("norm_type", [2, 0])
@pytest.mark.parametrize("moment_mode", [0, 1], ids=["inside", "outside"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_novograd(dtype, moment_mode, norm_type, own_dtype, device):
    params = make(device, dtype)
    start = [p.clone() for p in params]
    wide = torch.promote_types(dtype, torch.float32)
    moments = [torch.zeros_like(p, dtype=None if own_dtype else wide) for p in params]
    running = torch.zeros(len(SIZES), device=device)
    args = (1e-3, 0.9, 0.7, 1e-6, 1, 1, 0.1, 1, moment_mode, norm_type)
    grads = make(device, dtype)
    flag = zero_flag(device) + 1  # which novograd does not look at
    lists = [grads, params, moments]
    multi_tensor_applier(amp_C.multi_tensor_novograd, flag, lists, running, *args)
    hyper = {"lr": 1e-3, "betas": (0.9, 0.7), "eps": 1e-6, "weight_decay": 0.1}
    hyper |= {"reg_inside_moment": moment_mode == 0, "norm_type": norm_type, "init_zero": True}
    for p, s, g in zip(params, start, grads, strict=True):
        if dtype == torch.float64:  # with float32 norms
            expected = novograd_reference(s, g, **hyper)
            torch.testing.assert_close(p, expected, rtol=1e-6, atol=1e-6)
        else:
            assert_as_accurate_as(lambda p, g: novograd_reference(p, g, **hyper), p, s, g)
    own = [g.double().norm() if norm_type else g.double().abs().sum() * 0 for g in grads]
    if norm_type == 0:
        own = [g.double().abs().max() if g.numel() else o for g, o in zip(grads, own, strict=True)]
    factor = 0.3**0.5 if norm_type else 0.3
    torch.testing.assert_close(running.double(), torch.stack(own) * factor, rtol=3e-7, atol=0)


# (gradients, parameters, copies)
LARS_DTYPES = [
    *((d, d, None) for d in FLOATS),
    *((d, torch.float32, d) for d in HALVES),
    *((torch.float32, torch.float32, d) for d in HALVES),
]


@pytest.mark.parametrize("is_skipped", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtypes", LARS_DTYPES, ids=str)
def test_lars(dtypes, momentum, is_skipped, device):
    params, grads = make(device, dtypes[1]), make(device, dtypes[0])
    start = [p.clone() for p in params]
    buffers = [torch.zeros_like(p) for p in params]
    copies = [] if dtypes[2] is None else [[torch.empty_like(p, dtype=dtypes[2]) for p in params]]
    grad_norms = norms(device, grads, torch.promote_types(dtypes[1], torch.float32))
    param_norms = norms(device, params, grad_norms.dtype)
    # weight decay, momentum, dampening, nesterov, first_run, wd_after_momentum, scale, is_skipped
    args = (0.05, 0.02, 0.1, 0.1, momentum, 0.3, momentum > 0, True, True, 0.5, is_skipped)
    lists = [grads, params, buffers, *copies]
    op = amp_C.multi_tensor_lars
    multi_tensor_applier(op, zero_flag(device), lists, grad_norms, param_norms, *args)
    hyper = {"lr": 0.05, "trust_coefficient": 0.02, "eps": 0.1, "weight_decay": 0.1}
    hyper |= {"momentum": momentum, "nesterov": momentum > 0, "is_skipped": is_skipped}
    for i, (p, s, g) in enumerate(zip(params, start, grads, strict=True)):
        own = g.to(p.dtype)
        assert_as_accurate_as(lambda p, g: lars_reference(p, 0.5 * g, **hyper), p, s, own)
        if copies:
            assert torch.equal(copies[0][i], p.to(dtypes[2]))


def test_lars_goes_on_with_its_buffers_and_honours_the_flag(device):
    params, buffers = make(device), [torch.zeros(n, device=device) for n in SIZES]
    start, history = [p.clone() for p in params], [make(device) for _ in range(2)]
    args = (0.5, 0.02, 0.0, 0.1, 0.9, 0.0, False, False, False, 1.0, False)
    for grads in history:
        pair = norms(device, grads), norms(device, params)
        lists = [grads, params, buffers]
        amp_C.multi_tensor_lars(65536, zero_flag(device), lists, *pair, *args)
    hyper = {"lr": 0.5, "trust_coefficient": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    for i, (p, s) in enumerate(zip(params, start, strict=True)):
        own = [g[i] for g in history]
        assert_as_accurate_as(lambda p, *g: lars_reference(p, *g, **hyper), p, s, *own, ulps=2)
    before = [p.clone() for p in params]
    amp_C.multi_tensor_lars(65536, zero_flag(device) + 1, lists, *pair, *args)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def test_results_do_not_depend_on_the_chunk_size(device):
    values, grads = make(device), make(device)
    results = []
    for chunk in CHUNKS:
        params, moments = [v.clone() for v in values], [torch.zeros_like(v) for v in values]
        running = torch.ones(len(SIZES), device=device)
        args = (running, 0.1, 0.9, 0.99, 1e-8, 1, 1, 0.1, 1, 1, 2)
        lists = [grads, params, moments]
        MultiTensorApply(chunk)(amp_C.multi_tensor_novograd, zero_flag(device), lists, *args)
        results.append([*params, running])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_empty_lists_do_nothing_and_bad_modes_raise(device):
    flag, none, xs = zero_flag(device), torch.zeros(0, device=device), make(device)
    amp_C.multi_tensor_adagrad(1, flag, [[]] * 3, 0.1, 1e-8, 0, 0.0)
    novograd = (0.1, 0.9, 0.99, 1e-8, 1, 1, 0.0, 1)
    amp_C.multi_tensor_novograd(1, flag, [[]] * 3, none, *novograd, 0, 2)
    lars = (0.1, 0.1, 0.0, 0.0, 0.9, 0.0, False, False, False, 1.0, False)
    amp_C.multi_tensor_lars(1, flag, [[]] * 4, none, none, *lars)
    with pytest.raises(RuntimeError, match="mode must be 0"):
        amp_C.multi_tensor_adagrad(1, flag, [xs] * 3, 0.1, 1e-8, 2, 0.0)
    with pytest.raises(RuntimeError, match="moment_mode must be 0"):
        amp_C.multi_tensor_novograd(1, flag, [xs] * 3, none, *novograd, 2, 2)
    with pytest.raises(RuntimeError, match="norm_type must be 2"):
        amp_C.multi_tensor_novograd(1, flag, [xs] * 3, none, *novograd, 0, 1)
    for op, args in ((amp_C.multi_tensor_adagrad, ()), (amp_C.multi_tensor_lars, (none, none))):
        numbers = (0.1, 1e-8, 0, 0.0) if not args else lars
        with pytest.raises(RuntimeError, match=r"tensor_lists.size\(\) != depth: expected 3"):
            op(1, flag, [xs] * 2, *args, *numbers)
