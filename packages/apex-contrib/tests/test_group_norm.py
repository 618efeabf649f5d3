"""GroupNorm against float64 PyTorch, over dtypes, shapes and layouts, and what torch asks."""

import importlib
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from apex.contrib.group_norm import GroupNorm
from apex.contrib.group_norm import group_norm as names
from apex.contrib.group_norm.group_norm import (
    cuda_group_norm_nhwc_one_pass,
    cuda_group_norm_nhwc_two_pass,
    cuda_group_norm_v2_nhwc,
    torch_group_norm,
)
from apex.contrib.group_norm.group_norm_nhwc import ops
from apex_testkit import FLOATS, assert_as_accurate_as, assert_same_bits, opcheck_samples
from apex_testkit.formulas import CHECKS, Case, check_sharded
from apex_testkit.grids import for_gpus

EPS = 1e-3
HALVES = (torch.float16, torch.bfloat16)


def oracle(x, weight, bias, groups=1, act=None, eps=EPS):
    """In the definition's words; of any dtype, so that plain PyTorch is measured by it too."""
    values = x.reshape(x.shape[0], groups, -1)
    deviation = values - values.mean(-1, keepdim=True)
    rstd = torch.rsqrt(deviation.square().mean(-1, keepdim=True) + eps)
    shape = (1, -1, *[1] * (x.dim() - 2))
    y = (deviation * rstd).reshape(x.shape)
    y = y if weight is None else y * weight.reshape(shape)
    y = y if bias is None else y + bias.reshape(shape)
    return F.silu(y) if act else y


def channels_last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def arguments(dtype, device, shape=(3, 6, 4, 3)):
    x = channels_last(torch.randn(shape, device=device, dtype=dtype))
    return x, *torch.randn(2, shape[1], device=device, dtype=dtype)


def wide(dtype, device, columns):
    """So many channels, or one more; and as many places of a few."""
    shape = (3, 6, columns, 2) if columns == 300 else (3, columns + columns % 2, 2, 3)
    return arguments(dtype, device, shape)


def case(act):
    return Case(
        lambda x, weight, bias: cuda_group_norm_nhwc_one_pass(x, 2, weight, bias, EPS, act),
        arguments,
        lambda x, weight, bias: oracle(x, weight, bias, 2, act),
        grads=(0, 1, 2),
        rows=(0,),
        operators=(ops.group_norm_nhwc_forward, ops.group_norm_nhwc_backward),
        decompositions=names.decompositions,
        ulps=4,
        wide=wide,
    )


CASES = {"plain": case(None), "silu": case("silu")}


def with_gradients(function, x, weight, bias, seed):
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    given = iter(leaves)
    y = function(*(None if t is None else next(given) for t in (x, weight, bias)))
    return y.detach(), *torch.autograd.grad(y, leaves, seed)


def compare(x, weight, bias, groups, act, seed, ulps=1.0):
    given = [t for t in (x, weight, bias) if t is not None]

    def whole(values):
        values = iter(values)
        return [None if t is None else next(values) for t in (x, weight, bias)]

    norm = lambda x, w, b: cuda_group_norm_nhwc_one_pass(x, groups, w, b, EPS, act)
    reference = lambda *t: with_gradients(
        lambda x, w, b: oracle(x, w, b, groups, act), *whole(t[:-1]), t[-1]
    )
    actual = with_gradients(norm, x, weight, bias, seed)
    if x.dtype == torch.float64:
        ulps *= 4 * max(1, x[:, 0].numel()) ** 0.5  # sums over rows
    assert_as_accurate_as(reference, actual, *given, seed, ulps=ulps)


# Shape and groups: what no width of a vector divides, one element per channel, one channel per
# group, one group, many samples, several parts of one sample; sums of blocks merged before rows.
SHAPES = {
    "odd": ((3, 15, 7, 5), 5),
    "pixel": ((4, 24, 1, 1), 3),
    "instance": ((2, 7, 6, 5), 7),
    "layer": ((2, 33, 3, 3), 1),
    "samples": ((17, 64, 2, 3), 32),
    "parts": ((3, 40, 33, 35), 4),
    "vector": ((1, 32, 20, 20), 8),
    **for_gpus(block=((2, 776, 2, 2), 8), wide=((1, 1027, 2, 1), 13), merged=((1, 256, 5, 13), 1)),
}
LAYOUTS = {
    "channels-last": channels_last,
    "contiguous": torch.Tensor.contiguous,
    "sliced": lambda t: torch.stack((t, t), -1)[..., 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize(("shape", "groups"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype, shape, groups, act, layout, device):
    x, weight, bias = arguments(dtype, device, shape)
    seed = torch.randn_like(x)
    compare(LAYOUTS[layout](x), weight, bias, groups, act, LAYOUTS[layout](seed))


@pytest.mark.parametrize("shape", [(5, 12), (2, 12, 9), (2, 12, 3, 2, 5)], ids=str)
def test_other_dimensions(shape, device):
    x, weight, bias = arguments(torch.float32, device, shape)
    compare(x, weight, bias, 4, "silu", torch.randn_like(x))


@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("absent", ["weight", "bias", "both"])
def test_without_weight_or_bias(absent, act, device):
    x, weight, bias = arguments(torch.float32, device)
    weight = None if absent in ("weight", "both") else weight
    bias = None if absent in ("bias", "both") else bias
    compare(x, weight, bias, 3, act, torch.randn_like(x))


def test_many_rows_of_one_sample(device):
    """More rows than 65,536, in parts that threads share."""
    x, weight, bias = arguments(torch.float32, device, (1, 4, 257, 256))
    compare(x, weight, bias, 2, None, torch.randn_like(x))


def test_many_samples(device):
    x, weight, bias = arguments(torch.float32, device, (65_537, 2, 1, 1))
    compare(x, weight, bias, 1, "silu", torch.randn_like(x))


@pytest.mark.parametrize("act", [None, "silu"])
def test_offsets_do_not_matter(act, device):
    """A border of zeros neither, which is far from the mean of what lies in it."""
    x, weight, bias = arguments(torch.float32, device, (2, 16, 30, 30))
    x = channels_last(F.pad(x[..., 2:-2, 2:-2] + 1e4, (2, 2, 2, 2)))
    offset = channels_last(torch.randn_like(x) + 1e4)
    for given in (x, offset):
        compare(given, weight, bias, 4, act, torch.randn_like(x))


MIXED = [
    (own, of_weight)
    for own in (torch.float32, *HALVES)
    for of_weight in (torch.float32, *HALVES)
    if own != of_weight
]


@pytest.mark.parametrize("dtypes", MIXED, ids=str)
def test_mixed_dtypes(dtypes, device):
    """The output has the input's dtype, gradients those of what they belong to."""
    own, of_weight = dtypes
    x, weight, bias = arguments(torch.float32, device, (2, 32, 5, 5))
    given = x.to(own), weight.to(of_weight), bias.to(of_weight)
    seed = torch.randn_like(x).to(own)
    norm = lambda x, w, b: cuda_group_norm_nhwc_one_pass(x, 8, w, b, EPS, "silu")
    actual = with_gradients(norm, *given, seed)
    assert [t.dtype for t in actual] == [own, own, of_weight, of_weight]
    reference = lambda x, w, b: oracle(x, w, b, 8, "silu")
    expected = with_gradients(reference, *(t.double() for t in given), seed.double())
    for a, e in zip(actual, expected, strict=True):
        # One rounding to the tensor's dtype; eight of float32, in which all is computed.
        unit = max(torch.finfo(a.dtype).eps, 1e-6)
        torch.testing.assert_close(a.double(), e, rtol=unit, atol=unit * float(e.abs().max()))


@pytest.mark.parametrize("act", [None, "swish"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_module(dtype, affine, act, device):
    """Channels-last and other input give the same, each in its own layout."""
    module = GroupNorm(4, 16, EPS, affine, device=device, dtype=dtype, act=act)
    x = torch.randn(2, 16, 5, 6, device=device, dtype=dtype)
    plain = F.group_norm(x.double(), 4, eps=EPS)
    plain = F.silu(plain) if act else plain
    unit = 4 * torch.finfo(dtype).eps
    for given in (x, channels_last(x)):
        y = module(given)
        assert y.dtype == dtype
        assert y.stride() == given.stride()
        torch.testing.assert_close(y.double(), plain, rtol=unit, atol=unit)
    assert sorted(module.state_dict()) == (["bias", "weight"] if affine else [])


def test_module_like_apex():
    module = GroupNorm(16, 128, act="SiLU")
    assert (module.act, module.eps, module.affine) == ("silu", 1e-5, True)
    assert module.sm == 0 or torch.cuda.is_available()
    assert repr(module) == "GroupNorm(16, 128, eps=1e-05, affine=True, act=silu)"
    assert 3136 in module.SUPPORTED_CHANNELS
    assert {16, 32} == module.SUPPORTED_GROUPS
    assert len(module.SUPPORTED_DTYPES) == 9
    assert all(hasattr(module, name) for name in module.__constants__)
    x = channels_last(torch.randn(2, 128, 8, 8))
    assert module._check_legality(x)
    assert not module._check_legality(x.contiguous())
    assert not module._check_legality(x.double())
    assert not module._check_v2_legality(x)
    with torch.no_grad():
        module.weight.fill_(7)
    module.reset_parameters()
    assert module.weight.eq(1).all()
    assert module.bias.eq(0).all()


def test_dtypes_that_torch_takes():
    """float64 with a float32 weight is computed as Apex's function for the other cases does."""
    module = GroupNorm(2, 6)
    x = channels_last(torch.randn(2, 6, 3, 3, dtype=torch.float64))
    expected = F.group_norm(x.float(), 2).double()
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(
        torch_group_norm(x, 2, None, None, 1e-5, "silu"), F.silu(F.group_norm(x, 2))
    )


V2 = [
    (True, {}),
    (False, {"count": 147}),
    (False, {"capability": (9, 0)}),
    (False, {"dtype": torch.float32}),
    (False, {"groups": 16}),
    (False, {"act": "silu"}),
    (False, {"side": 16}),
]


@pytest.mark.parametrize(("expected", "changed"), V2, ids=str)
def test_what_second_kernels_of_apex_take(expected, changed, monkeypatch):
    """Of a GPU with 148 multiprocessors that is not there: fake tensors have no memory."""
    facts = {"capability": (10, 0), "count": 148, "dtype": torch.float16, "groups": 32}
    facts |= {"act": None, "side": 64} | changed
    answer = (facts["capability"], facts["count"])
    monkeypatch.setattr(names, "get_cc_and_sm_count", lambda index: answer)
    module = GroupNorm(facts["groups"], 320, act=facts["act"]).to(facts["dtype"])
    with FakeTensorMode():
        x = torch.empty(2, facts["side"], facts["side"], 320, device="cuda", dtype=facts["dtype"])
    assert module._check_v2_legality(x.movedim(-1, 1)) == expected


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_changes_nothing(dtype, device):
    """A convolution's 16-bit output stays 16-bit; gradients have the parameters' dtype."""
    module = GroupNorm(4, 16, act="silu").to(device)
    x = channels_last(torch.randn(2, 16, 4, 4, device=device)).to(dtype).requires_grad_()
    with torch.autocast(torch.device(device).type, dtype):
        y = module(x)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert x.grad.dtype == dtype
    assert module.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (2, 4, 0, 3), (0, 4)], ids=str)
def test_no_elements(shape, device):
    _, weight, bias = arguments(torch.float32, device, (1, 4, 1, 1))
    x = torch.ones(shape, device=device)
    norm = lambda *given: cuda_group_norm_nhwc_one_pass(given[0], 2, *given[1:], EPS)
    y, dx, dweight, dbias = with_gradients(norm, x, weight, bias, x)
    assert y.shape == dx.shape == shape
    assert not dweight.any()
    assert not dbias.any()


def test_equal_numbers(device):
    """No variance: the output is the bias, and nothing is infinite."""
    x = channels_last(torch.full((2, 4, 9, 9), 1.1, device=device))
    y = cuda_group_norm_nhwc_one_pass(x, 2, None, None, 1e-12)
    torch.testing.assert_close(y, torch.zeros_like(x), rtol=0, atol=1e-6)


def test_infinities_stay_in_their_group(device):
    x, weight, bias = arguments(torch.float32, device, (2, 6, 4, 4))
    x[1, 1, 2, 2] = torch.inf
    y = cuda_group_norm_nhwc_one_pass(x, 3, weight, bias, EPS)
    assert y[1, :2].isnan().any()
    keep = torch.ones_like(y, dtype=torch.bool)
    keep[1, :2] = False
    assert y[keep].isfinite().all()


@pytest.mark.parametrize("shape", [(3, 32, 40, 40), (2, 32, 64, 64)], ids=str)
def test_same_bits(shape, device):
    """However many threads share the samples."""
    x, weight, bias = arguments(torch.float32, device, shape)
    seed = torch.randn_like(x)
    norm = lambda *given: cuda_group_norm_nhwc_one_pass(given[0], 4, *given[1:], EPS, "silu")
    assert_same_bits(lambda: with_gradients(norm, x, weight, bias, seed))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_formula(check, case, device):
    """Compiled code, derivatives, transforms, vmap, export, tracing, autocast."""
    check(CASES[case], device)


def on_ranks(rank, world_size):
    check_sharded(CASES["silu"], rank, world_size)


def test_sharded(two_ranks):
    two_ranks(on_ranks)


def test_module_compiles_without_breaks(device):
    module = GroupNorm(4, 16, act="silu").to(device)
    x = channels_last(torch.randn(2, 16, 4, 4, device=device))
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))
    assert compiled(x).is_contiguous(memory_format=torch.channels_last)


def test_is_a_good_citizen_of_torch(device):
    x, weight, bias = arguments(torch.float32, device)
    forward = [(x, weight, bias, 2, EPS, True), (x[:0], None, None, 3, 0.0, False)]
    forward.append((x.contiguous(), None, bias, 1, EPS, False))
    opcheck_samples(ops.group_norm_nhwc_forward, forward)
    _, mean, rstd = ops.group_norm_nhwc_forward(*forward[0])
    dy = torch.ones(1, 1, 1, 1, device=device).expand_as(x)
    samples = [(dy, x, weight, bias, mean, rstd, 2, EPS, True, wanted) for wanted in (False, True)]
    opcheck_samples(ops.group_norm_nhwc_backward, samples)
    samples = [(x.clone().requires_grad_(), 2, weight, bias, EPS, "silu"), (x, 2, None, None, 0.0)]
    opcheck_samples(torch.ops.apex.group_norm_nhwc_fprop.default, samples)
    sums = torch.cat((mean, rstd))
    samples = [(torch.ones_like(x), sums, x, 2, weight, bias, EPS, "silu", 2, True)]
    opcheck_samples(torch.ops.apex.group_norm_nhwc_bprop.default, samples)


@pytest.mark.parametrize("act", [None, "silu"])
def test_operators_of_apex(act, device):
    x, weight, bias = arguments(torch.float32, device)
    seed = torch.randn_like(x)
    expected = with_gradients(
        lambda *t: oracle(*t, 2, act), *(t.double() for t in (x, weight, bias)), seed.double()
    )
    op = lambda x, w, b: torch.ops.apex.group_norm_nhwc_fprop(x, 2, w, b, EPS, act, 2)[0]
    for actual in (
        with_gradients(op, x, weight, bias, seed),
        with_gradients(torch.compile(op, fullgraph=True), x, weight, bias, seed),
    ):
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=1e-5)
    for function in (cuda_group_norm_nhwc_two_pass, cuda_group_norm_v2_nhwc):
        y = function(x, 2, weight, bias, EPS, act)
        torch.testing.assert_close(y.double(), expected[0], rtol=1e-5, atol=1e-5)


def test_a_gradient_in_another_layout_is_copied_with_a_warning(device):
    names.one_time_warning.cache_clear()
    x, weight, bias = arguments(torch.float32, device)
    _, sums = names.group_norm_nhwc_fprop(x, 2, weight, bias, EPS)
    dy = torch.randn_like(x)
    with pytest.warns(UserWarning, match="grad_output is not channels-last"):
        copied = names.group_norm_nhwc_bprop(dy.contiguous(), sums, x, 2, weight, bias, EPS)
    direct = names.group_norm_nhwc_bprop(dy, sums, x, 2, weight, bias, EPS)
    for a, b in zip(copied, direct, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_margins(monkeypatch):
    x, weight, bias = arguments(torch.float32, "cpu")
    monkeypatch.setenv("APEX_GROUP_NORM_FPROP_SM_MARGIN", "4")
    with pytest.raises(NotImplementedError, match="FPROP_SM_MARGIN is 4"):
        names.group_norm_nhwc_fprop(x, 2, weight, bias, EPS)
    _, sums = names.group_norm_nhwc_fprop(x, 2, weight, bias, EPS, None, 1, True)
    monkeypatch.setenv("APEX_GROUP_NORM_BPROP_SM_MARGIN", "4")
    with pytest.raises(NotImplementedError, match="BPROP_SM_MARGIN is 4"):
        names.group_norm_nhwc_bprop(x, sums, x, 2, weight, bias, EPS)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("is_permuted", [False, True])
def test_extension_modules_of_apex(is_permuted, silu, device):
    import group_norm_cuda
    import group_norm_v2_cuda

    x, weight, bias = arguments(torch.float32, device)
    seed = torch.randn_like(x)
    act = "silu" if silu else None
    wide = (t.double() for t in (x, weight, bias))
    expected = list(with_gradients(lambda *t: oracle(*t, 2, act), *wide, seed.double()))
    if is_permuted:
        x, seed, expected[0], expected[1] = (
            t.movedim(1, -1) for t in (x, seed, expected[0], expected[1])
        )
    y, sums = group_norm_cuda.forward(x, 2, weight, bias, EPS, 1, silu)
    gradients = group_norm_cuda.backward(seed, sums, x, 2, weight, bias, EPS, 1, silu)
    results = [[y, *gradients]]
    statistics = torch.empty_like(sums)
    y = group_norm_v2_cuda.gn(x, weight, bias, EPS, silu, 2, statistics)
    gradients = group_norm_v2_cuda.gn_bwd(seed, x, weight, bias, statistics, EPS, silu, 2)
    results.append([y, *gradients])
    for actual in results:
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="mean_var_out must have shape"):
        group_norm_v2_cuda.gn(x, weight, bias, EPS, silu, 2, statistics[1:])


X, W = torch.ones(2, 6, 3, 3), torch.ones(6)
BAD = {
    "integers": (TypeError, "x must be a float64", (X.int(), 2, W, W, EPS)),
    "weight's dtype": (TypeError, "weight is torch.float64, but x is", (X, 2, W.double(), W, EPS)),
    "bias's dtype": (TypeError, "bias must be a float64", (X, 2, None, W.int(), EPS)),
    "two dtypes": (TypeError, "bias is torch.float16, but weight", (X, 2, W, W.half(), EPS)),
    "dimensions": (ValueError, r"x must have shape \[N, C, \*\]", (W, 2, W, W, EPS)),
    "channels": (ValueError, r"weight must have shape \[6\]", (X, 2, W[:5], W, EPS)),
    "groups": (ValueError, "must divide the 6 channels", (X, 4, W, W, EPS)),
    "no groups": (ValueError, "must divide the 6 channels", (X, 0, W, W, EPS)),
    "eps": (ValueError, "eps must not be negative, got -1", (X, 2, W, W, -1.0)),
    "act": (ValueError, 'act must be "silu", "swish"', (X, 2, W, W, EPS, "gelu")),
    "devices": (ValueError, r"bias must have shape \[6\] on cpu", (X, 2, W, W.to("meta"), EPS)),
}


@pytest.mark.parametrize(("error", "text", "given"), BAD.values(), ids=BAD.keys())
def test_bad_input(error, text, given):
    with pytest.raises(error, match=f"GroupNorm: .*{text}"):
        cuda_group_norm_nhwc_one_pass(*given)


def test_bad_input_in_another_layout():
    with pytest.raises(TypeError, match="x must be a float64"):
        GroupNorm(2, 6)(X.int())
    with pytest.raises(ValueError, match=r"GroupNorm: weight must have shape \[6\]"):
        GroupNorm(2, 8)(X)
    with pytest.raises(ValueError, match=r"GroupNorm: .* must divide the 6 channels"):
        GroupNorm(4, 8, affine=False)(X)


def test_bad_options():
    for options in ((0, 4), (3, 4), (4, 0), (-2, 4)):
        with pytest.raises(ValueError, match="num_groups must divide num_channels"):
            GroupNorm(*options)
    with pytest.raises(ValueError, match="eps must not be negative"):
        GroupNorm(2, 4, -1.0)
    with pytest.raises(ValueError, match="act must be"):
        GroupNorm(2, 4, act="gelu")
    with pytest.raises(ValueError, match="must be channels-last"):
        names.group_norm_nhwc_fprop(torch.randn(2, 6, 3, 3), 2, W, W, EPS)
    with pytest.raises(ValueError, match="passes must be 1 or 2, got 3"):
        names.group_norm_nhwc_fprop(channels_last(X), 2, W, W, EPS, None, 3)
    with pytest.raises(ValueError, match="grad_output must have the shape"):
        names.group_norm_nhwc_bprop(X[:1], W, channels_last(X), 2, W, W, EPS)


def test_kernels_check_what_python_did_not():
    for given, text in [
        ((W, W, W, 2, EPS, False), r"x must be \[N, channels, \*\]"),
        ((X[:, :0], W[:0], W[:0], 2, EPS, False), r"x must be \[N, channels, \*\]"),
        ((X, W, W, 4, EPS, False), "groups must divide the 6 channels of x, got 4"),
        ((X, W[:5], W, 2, EPS, False), "weight must be contiguous, with 6 elements"),
        ((X, W, W.double(), 2, EPS, False), "bias must be float32, float16 or bfloat16"),
        ((X.long(), W, W, 2, EPS, False), "got int64"),
        ((X, W, W, 2, -1.0, False), "eps must not be negative"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            ops.group_norm_nhwc_forward(*given)
    y, mean, rstd = ops.group_norm_nhwc_forward(X, W, W, 2, EPS, False)
    with pytest.raises(RuntimeError, match="rstd must be contiguous, with 4 elements"):
        ops.group_norm_nhwc_backward(y, X, W, W, mean, rstd[:3], 2, EPS, False, True)
    with pytest.raises(RuntimeError, match="weight and bias must have one dtype"):
        ops.group_norm_nhwc_backward(y, X, W, W.half(), mean, rstd, 2, EPS, False, True)
    for dy in (y[:1], y.double()):
        with pytest.raises(RuntimeError, match="dy must have shape, dtype and device of x"):
            ops.group_norm_nhwc_backward(dy, X, W, W, mean, rstd, 2, EPS, False, True)


@pytest.mark.parametrize("module", ["group_norm_cuda", "group_norm_v2_cuda"])
def test_import_error_where_kernels_cannot_run(module, monkeypatch):
    """So that `try: import ...; except ImportError:` of other projects finds its fallback."""
    from apex.contrib._ops import library

    monkeypatch.setattr(library, "manifest", dict)
    monkeypatch.setattr(library, "_loaded", set())
    monkeypatch.setenv("APEX_JIT", "0")
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ImportError, match=r"neither prebuilt .* APEX_JIT=0"):
        importlib.import_module(module)
