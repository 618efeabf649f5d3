"""LAMB's operators, Apex's first FusedLAMB and the extension modules against a float64 oracle."""

import copy
import math

import distributed_lamb_cuda
import fused_lamb_cuda
import pytest
import torch

from apex.contrib.optimizers import FusedLAMB
from apex.contrib.optimizers.sharded_lamb import lamb_apply, lamb_step, lamb_terms
from apex_testkit import FLOATS, HALVES, assert_as_accurate_as, opcheck_samples
from apex_testkit.optimizers_lamb import lamb_reference

HYPER = {
    "lr": 0.1,
    "device_lr": None,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-6,
    "weight_decay": 0.1,
    "step": 1,
    "device_step": None,
    "bias_correction": True,
    "grad_averaging": True,
    "decoupled": True,
    "use_nvlamb": False,
    "global_grad_norm": None,
    "max_grad_norm": 1.0,
    "inv_scale": None,
    "found_inf": None,
}
SIZES = (5, 0, 130, 1000)
OPTIONS = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1, "eps": 1e-6}


def hyper(**changes):
    return tuple({**HYPER, **changes}.values())


def randoms(device, dtype=torch.float32, sizes=SIZES):
    return [torch.randn(n, device=device).to(dtype) for n in sizes]


def zeros(like, dtype=torch.float32):
    return [torch.zeros_like(t, dtype=dtype) for t in like]


def high_bytes(x):
    return (x.half().view(torch.int16) >> 8).to(torch.uint8)


@pytest.mark.parametrize("narrow", [False, True], ids=["wide_moments", "moments_like_params"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_step_is_as_accurate_as_plain(dtype, narrow, device):
    wide = dtype if narrow or dtype == torch.float64 else torch.float32
    sizes = (5, 0, 130, 20_001)  # a GPU's block takes 16,384 elements at most
    params, grads = randoms(device, dtype, sizes), randoms(device, dtype, sizes)
    start = [p.clone() for p in params]
    lists = (params, grads, zeros(params, wide), zeros(params, wide), [])
    norm = torch.cat(grads).double().norm().reshape(1)
    lamb_step(*lists, *hyper(global_grad_norm=norm, max_grad_norm=2.0))
    assert_as_accurate_as(
        lambda p, g: lamb_reference(p, g, max_grad_norm=2.0, **OPTIONS), params, start, grads
    )


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES, torch.uint8], ids=str)
def test_copies_passes_and_numbers_on_the_device(dtype, device):
    def number(value, of=torch.float32):
        return torch.tensor([value], dtype=of, device=device)

    params = randoms(device)
    start, copies = [p.clone() for p in params], zeros(params, dtype)
    grads = randoms(device, torch.bfloat16)
    lists = (params, grads, zeros(params), zeros(params), copies)
    given = {
        "device_lr": number(0.2),
        "device_step": number(1, torch.int32),
        "lr": math.nan,
        "step": 0,
        "inv_scale": number(0.25),
        "use_nvlamb": True,
        "weight_decay": 0.0,
        "decoupled": False,
    }
    squares = torch.full((4, 2), -1.0, dtype=torch.float64, device=device)
    off = {**given, "found_inf": number(1.0)}
    lamb_step(*lists, *hyper(**off), squares, 1)
    assert (squares == -1).all()
    lamb_step(*lists, *hyper(**given, found_inf=number(0.0)), squares, 1)
    assert squares[1].tolist() == [0.0, 0.0]  # the tensor without elements
    lamb_step(*lists, *hyper(**given), squares, 2)
    options = {**OPTIONS, "lr": 0.2, "weight_decay": 0.0, "use_nvlamb": True}
    scaled = [g.float() / 4 for g in grads]
    assert_as_accurate_as(
        lambda p, g: lamb_reference(p, g, max_grad_norm=0.0, **options), params, start, scaled
    )
    for param, written in zip(params, copies, strict=True):
        expected = high_bytes(param) if dtype == torch.uint8 else param.to(dtype)
        assert torch.equal(written, expected)


def test_norms_of_several_chunks(device):
    """A chunk has 65,536 elements: a large one is alone in its chunk."""
    params, grads = (randoms(device, torch.bfloat16, (5, 65_537)) for _ in range(2))
    params[1][-1] = 1024
    moments = (zeros(params, torch.bfloat16), zeros(params, torch.bfloat16))
    squares = torch.zeros(2, 2, dtype=torch.float64, device=device)
    lamb_step(params, grads, *moments, [], *hyper(), squares, 1)
    # The first step's update is the gradient's sign, and the decay.
    updates = [g.double().sign() + 0.1 * p.double() for p, g in zip(params, grads, strict=True)]
    pairs = zip(params, updates, strict=True)
    rows = [torch.stack([t.double().square().sum() for t in pair]) for pair in pairs]
    torch.testing.assert_close(squares, torch.stack(rows), rtol=2**-7, atol=0)


def test_bad_lists(device):
    params = randoms(device)
    moments = (zeros(params), zeros(params))
    for lists, message in (
        ((params, [g.double() for g in params], *moments, []), "grads must be float32, float16"),
        ((params, params[:2], *moments, []), "has 2 tensors"),
        (
            (params, params, *(zeros(params, torch.half) for _ in "mv"), params),
            "exp_avg_sqs must be float32",
        ),
        ((params, params, *moments, zeros(params, torch.int32)), "copies must be float32"),
    ):
        before = [p.clone() for p in params]
        with pytest.raises(RuntimeError, match=message):
            lamb_step(*lists, *hyper())
        assert all(map(torch.equal, before, params))
    with pytest.raises(RuntimeError, match="only_pass 1 needs squares"):
        lamb_step(params, params, *moments, [], *hyper(), None, 1)


def test_ops_pass_opcheck(device):
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    params, grads = randoms(device), randoms(device, torch.half)
    moments = (zeros(params), zeros(params))
    squares = torch.ones(4, 2, dtype=torch.float64, device=device)
    samples = [(params, grads, *moments, [], *hyper())]
    samples.append((params, grads, *moments, zeros(params, torch.half), *hyper(), squares, 1))
    opcheck_samples(lamb_step, samples)
    numbers = torch.rand(4, 8, dtype=torch.float64, device=device)
    factor = torch.ones(1, dtype=torch.float64, device=device)
    updates = zeros(params)
    opcheck_samples(lamb_terms, [(grads, params, *moments, updates, numbers, factor, True, flag)])
    norms = torch.rand(3, 4, dtype=torch.float64, device=device).unbind()
    lr = torch.ones(1, device=device)
    opcheck_samples(lamb_apply, [(params, updates, grads, *norms, lr, False, flag)])


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_fused_lamb_cuda(dtype, mode, device):
    params, grads = randoms(device, dtype), randoms(device, dtype)
    start = [p.clone() for p in params]
    given = [g.clone() for g in grads]
    norm = torch.cat(grads).double().norm().item()
    lists = [grads, params, zeros(params, dtype), zeros(params, dtype)]
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    fused_lamb_cuda.lamb(64, flag, lists, 0.1, 0.9, 0.99, 1e-6, 1, 1, 0.1, 0, mode, norm, 2.0)
    options = {**OPTIONS, "max_grad_norm": 2.0, "grad_averaging": False, "adam_w_mode": mode == 1}
    assert_as_accurate_as(lambda p, g: lamb_reference(p, g, **options), params, start, grads)
    assert all(map(torch.equal, given, grads))
    with pytest.raises(RuntimeError, match="mode must be 0 or 1"):
        fused_lamb_cuda.lamb(64, flag, lists, 0.1, 0.9, 0.99, 1e-6, 1, 1, 0.1, 0, 2, norm, 2.0)


def two_stages(params, all_grads, beta1, corrects, decay, mode):
    """LAMB in plain PyTorch, with other numbers for each tensor; gradients were scaled by 4."""
    scaled = []
    for grads in all_grads:
        norm = torch.cat(grads).square().sum().sqrt() / 4
        clip = (2.0 / (norm + 1e-6)).clamp(max=1)
        scaled.append([g / 4 * clip for g in grads])
    rows = []
    for i, own in enumerate(zip(params, *scaled, strict=True)):
        options = {
            "lr": 0.1,
            "betas": (beta1[i].item(), 0.99),
            "bias_correction": bool(corrects[i]),
            "weight_decay": decay[i].item(),
            "adam_w_mode": mode == 1,
            "max_grad_norm": 0.0,
        }
        rows += lamb_reference([own[0]], *([g] for g in own[1:]), **options)
    return rows


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8], ids=str)
def test_distributed_lamb_cuda(dtype, mode, device):
    """Both stages, with other numbers for each tensor; two steps."""
    count = len(SIZES)
    params = randoms(device)
    start, copies, updates = [p.clone() for p in params], zeros(params, dtype), zeros(params)
    moments = (zeros(params), zeros(params))
    all_grads = [randoms(device, torch.half) for _ in range(2)]
    flag = torch.zeros(1, dtype=torch.int32, device=device)

    def tensor(*values):
        return torch.tensor(values, device=device)

    beta1, beta2 = tensor(0.9, 0.8, 0.7, 0.6), tensor(0.99)
    corrects, decay = tensor(1, 1, 0, 1), tensor(0.1, 0.1, 0.0, 0.2)
    for step, grads in enumerate(all_grads, start=1):
        norm = torch.cat(grads).float().norm()
        terms = (tensor(step), tensor(1e-6), mode, decay, tensor(4.0), norm, 2.0)
        lists = [grads, params, *moments, updates]
        numbers = (beta1, beta2, 1 - beta1, corrects, *terms)
        distributed_lamb_cuda.multi_tensor_lamb_compute_update_term(64, flag, lists, *numbers)
        p_norms = torch.stack([p.norm() for p in params])
        u_norms = torch.stack([u.norm() for u in updates]).flip(0)  # in another order
        offset = torch.arange(count, device=device).flip(0)
        weights = (p_norms, u_norms, offset, tensor(0.1), decay)
        lists = [updates, params, copies]
        distributed_lamb_cuda.multi_tensor_lamb_update_weights(
            64, flag, lists, *weights, norm, False
        )

    def plain(params, all_grads):
        return two_stages(params, all_grads, beta1, corrects, decay, mode)

    wide = [[g.float() for g in grads] for grads in all_grads]
    # The norms of updates that plain PyTorch takes are the kernel's, rounded to float32.
    assert_as_accurate_as(plain, params, start, wide, ulps=2)
    expected = [high_bytes(p) if dtype == torch.uint8 else p.half() for p in params]
    assert all(map(torch.equal, copies, expected))


def test_distributed_lamb_cuda_refuses_and_skips(device):
    params, flag = randoms(device), torch.zeros(1, dtype=torch.int32, device=device)
    ones, offset = torch.ones(4, device=device), torch.arange(4, device=device)
    lists = [zeros(params), params, zeros(params)]
    update_weights = distributed_lamb_cuda.multi_tensor_lamb_update_weights
    with pytest.raises(RuntimeError, match="decay must have one number for each of 4 tensors"):
        update_weights(64, flag, lists, ones, ones, offset, ones[:1], ones[:2], ones[:1], False)
    before = params[0].clone()
    lists[0] = [p.clone() for p in params]
    for off, norm in ((flag + 1, ones[:1]), (flag, ones[:1] * math.inf)):
        update_weights(64, off, lists, ones, ones, offset, ones[:1], ones, norm, False)
        assert torch.equal(params[0], before)
    with pytest.raises(RuntimeError, match="depth: expected lists of u, p, p_copy; got 2"):
        update_weights(64, flag, lists[:2], ones, ones, offset, ones[:1], ones, ones[:1], False)


# The class.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"grad_averaging": False, "adam_w_mode": False},
        {"max_grad_norm": 0.0, "weight_decay": 0.0},
    ],
    ids=["plain", "l2", "no_clipping"],
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_class_against_float64(dtype, options, device):
    start = randoms(device, dtype)
    # What 16 bits keep between steps is rounded; plain PyTorch does not round there.
    grads = [randoms(device, dtype) for _ in range(1 if dtype in HALVES else 3)]
    options = {**OPTIONS, "max_grad_norm": 2.0, **options}
    params = [p.clone().requires_grad_() for p in start]
    optimizer = FusedLAMB(params, **options)
    for own in grads:
        for param, grad in zip(params, own, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    assert optimizer.state[params[0]]["exp_avg"].dtype == dtype
    assert_as_accurate_as(
        lambda p, g: lamb_reference(p, *g, **options), [p.detach() for p in params], start, grads
    )


def test_dtypes_and_devices_share_one_norm(device):
    start = [torch.randn(70, device=device), torch.randn(9).bfloat16(), torch.randn(5).double()]
    grads = [torch.randn_like(p) for p in start]
    params = [p.clone().requires_grad_() for p in start]
    optimizer = FusedLAMB(params, max_grad_norm=0.5, **OPTIONS)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.step()

    def plain(start, grads):
        start, grads = ([t.cpu() for t in own] for own in (start, grads))
        return lamb_reference(start, grads, max_grad_norm=0.5, **OPTIONS)

    truth = plain(*([t.double() for t in own] for own in (start, grads)))
    for param, want in zip(params, truth, strict=True):
        eps = torch.finfo(param.dtype).eps
        rtol = max(eps, 2e-6)
        torch.testing.assert_close(param.detach().double().cpu(), want, rtol=rtol, atol=rtol)


def test_state_closure_and_zero_grad(device):
    params = [p.requires_grad_() for p in randoms(device)]
    optimizer = FusedLAMB(params, set_grad_none=False, **OPTIONS)

    def closure():
        loss = sum((p * p).sum() for p in params)
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    again = FusedLAMB([p.detach().clone().requires_grad_() for p in params], lr=1.0)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert again.param_groups[0]["step"] == 1
    for opt in (optimizer, again):
        for param in opt.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        opt.step()
    assert all(map(torch.equal, params, again.param_groups[0]["params"]))
    optimizer.zero_grad()
    assert not params[0].grad.any()
    again.zero_grad()
    assert again.param_groups[0]["params"][0].grad is None


def test_bad_input(device):
    p = torch.randn(5, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="amsgrad"):
        FusedLAMB([p], amsgrad=True)
    for name, value in (("lr", -1), ("betas", (0.9, 1.0)), ("max_grad_norm", -1)):
        with pytest.raises(ValueError, match=name):
            FusedLAMB([p], **{name: value})
    other = torch.randn(5, device=device).to(torch.complex64).requires_grad_()
    optimizer = FusedLAMB([p, other])
    before = p.detach().clone()
    p.grad, other.grad = torch.ones_like(p), torch.ones_like(other)
    with pytest.raises(RuntimeError, match=r"FusedLAMB only support fp16 and fp32\."):
        optimizer.step()
    p.grad, other.grad = torch.ones_like(p).to_sparse(), None
    with pytest.raises(RuntimeError, match="a gradient is sparse"):
        optimizer.step()
    assert torch.equal(p.detach(), before)
    assert "step" not in optimizer.param_groups[0]
