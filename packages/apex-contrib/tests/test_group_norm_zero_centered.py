"""GroupNorm with zero-centred weights, which multiplies by 1 + weight."""

import pytest
import torch
from torch.nn import functional as F

from apex.contrib.group_norm import GroupNorm
from apex.contrib.group_norm import group_norm as names
from apex.contrib.group_norm.group_norm_nhwc import ops
from apex_testkit import FLOATS, HALVES, opcheck_samples
from apex_testkit.formulas import CHECKS, Case, check_sharded

EPS = 1e-3
GROUPS = 2


def group_norm(x, weight, bias, act="silu", **options):
    return names.cuda_group_norm_nhwc_one_pass(x, GROUPS, weight, bias, EPS, act, **options)


def oracle(x, weight, bias):
    """In the definition's words; of any dtype, so that plain PyTorch is measured by it too."""
    values = x.reshape(x.shape[0], GROUPS, -1)
    deviation = values - values.mean(-1, keepdim=True)
    rstd = torch.rsqrt(deviation.square().mean(-1, keepdim=True) + EPS)
    scale, shift = (1 + weight)[:, None, None], bias[:, None, None]
    return F.silu((deviation * rstd).reshape(x.shape) * scale + shift)


def channels_last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def arguments(dtype, device):
    x = channels_last(torch.randn(3, 6, 4, 3, device=device, dtype=dtype))
    return x, *torch.randn(2, 6, device=device, dtype=dtype)


def test_weight_and_bias_with_gaps(device):
    x, weight, bias = arguments(torch.float32, device)
    gaps = [torch.stack([each, each], 1)[:, 0] for each in (weight, bias)]
    assert not gaps[0].is_contiguous()
    y = group_norm(x, *gaps, zero_centered_gamma=True)
    torch.testing.assert_close(y, oracle(x, weight, bias))


CASE = Case(
    lambda x, weight, bias: group_norm(x, weight, bias, zero_centered_gamma=True),
    arguments,
    oracle,
    grads=(0, 1, 2),
    rows=(0,),
    operators=(ops.group_norm_nhwc_forward, ops.group_norm_nhwc_backward),
    decompositions=names.decompositions,
    ulps=4,
)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_formula(check, device):
    """Compiled code, derivatives, transforms, vmap, export, tracing, autocast."""
    check(CASE, device)


def on_ranks(rank, world_size):
    check_sharded(CASE, rank, world_size)


def test_sharded(two_ranks):
    two_ranks(on_ranks)


def with_gradients(function, x, weight, bias, seed):
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, seed)


@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zero_centered(dtype, act, device):
    """The bits of a plain norm of 1 + weight, as far as the dtype holds that sum."""
    x, weight, bias = arguments(dtype, device)
    weight, seed = (weight * 8).round() / 8, torch.randn_like(x)
    norm = lambda *t, **options: group_norm(*t, act, **options)
    centered = lambda *t: norm(*t, zero_centered_gamma=True)
    actual = with_gradients(centered, x, weight, bias, seed)
    for a, e in zip(actual, with_gradients(norm, x, 1 + weight, bias, seed), strict=True):
        assert torch.equal(a, e)
    assert torch.equal(centered(x, None, bias), norm(x, None, bias))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_zero_centered_module(dtype, device):
    """A weight counts that 1 + weight would not hold in 16 bits, in one number in ten.

    For torch's function, which takes other layouts, too.
    """
    small = 2.0 ** (-10 if dtype == torch.bfloat16 else -12)
    module = GroupNorm(4, 64, device=device, dtype=dtype, zero_centered_gamma=True)
    plain = GroupNorm(4, 64, device=device, dtype=dtype)
    assert repr(module).endswith("act=None, zero_centered_gamma=True)")
    assert module.weight.eq(0).all()
    assert list(module.state_dict()) == list(plain.state_dict())
    x = torch.randn(2, 64, 16, 16, device=device).to(dtype)
    # plain(x) is torch's, which on a GPU rounds mean and rstd of 16-bit input to 16 bits. The
    # module passes float32 to it.
    in_float32 = F.group_norm(x.float(), 4).to(dtype)
    for given, expected in ((x, in_float32), (channels_last(x), plain(channels_last(x)))):
        module.reset_parameters()
        torch.testing.assert_close(module(given), expected)
        torch.nn.init.constant_(module.weight, small)
        y, xhat = module(given), F.group_norm(given.double(), 4)
        assert y.dtype == dtype
        assert y.stride() == given.stride()
        truth = (xhat * (1 + small)).to(dtype)
        assert (y != truth).double().mean() < 0.01  # near a tie, float32 may round the other way
        assert (xhat.to(dtype) != truth).double().mean() > 0.1
    assert GroupNorm(4, 64, affine=False, zero_centered_gamma=True).weight is None
    del plain.__dict__["zero_centered_gamma"]  # as a pickle of Apex's has none
    assert plain(x).abs().max() > 1


def test_opcheck(device):
    """Calls without the argument are those of test_group_norm.py."""
    x, weight, bias = arguments(torch.float32, device)
    samples = [(x, weight, bias, GROUPS, EPS, True, True)]
    opcheck_samples(ops.group_norm_nhwc_forward, samples)
    _, mean, rstd = ops.group_norm_nhwc_forward(*samples[0])
    samples = [(x, x, weight, bias, mean, rstd, GROUPS, EPS, True, True, True)]
    opcheck_samples(ops.group_norm_nhwc_backward, samples)
