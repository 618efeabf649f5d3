"""FastLayerNorm against float64 PyTorch, over dtypes, shapes and layouts, and what torch asks."""

import copy
import importlib
import inspect
import sys

import pytest
import torch

from apex.contrib.layer_norm import FastLayerNorm
from apex.contrib.layer_norm.fast_layer_norm import ops
from apex.contrib.layer_norm.layer_norm import (
    FastLayerNormFN,
    _fast_layer_norm,
    decompositions,
)
from apex_testkit import (
    FLOATS,
    LAYOUTS,
    SHAPES,
    assert_as_accurate_as,
    assert_same_bits,
    opcheck_samples,
)
from apex_testkit.formulas import CHECKS, Case, check_sharded

EPS = 1e-3
HALVES = (torch.float16, torch.bfloat16)


def oracle(x, weight, bias, eps=EPS):
    deviation = x - x.mean(-1, keepdim=True)
    return deviation * torch.rsqrt(deviation.square().mean(-1, keepdim=True) + eps) * weight + bias


def arguments(dtype, device, rows=4, columns=7):
    x = torch.randn(rows, columns, device=device, dtype=dtype)
    weight, bias = torch.randn(2, columns, device=device, dtype=dtype)
    return x, torch.copysign(weight.abs() + 0.5, weight), bias


def case(**options):
    """Weights count from zero, or from one with ``zero_centered_gamma``."""
    origin = int(options.get("zero_centered_gamma", False))
    return Case(
        lambda x, weight, bias: FastLayerNormFN.apply(x, weight, bias, EPS, **options),
        arguments,
        lambda x, weight, bias: oracle(x, origin + weight, bias),
        grads=(0, 1, 2),
        rows=(0,),
        operators=(ops.fast_layer_norm_forward, ops.fast_layer_norm_backward),
        decompositions=decompositions,
        ulps=3,
        wide=lambda dtype, device, columns: arguments(dtype, device, columns=columns),
    )


CASES = {"plain": case(), "zero-centred": case(zero_centered_gamma=True)}


def with_gradients(function, x, weight, bias, seed):
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, seed)


# One column has no variance. 16 bits of an output lack digits of the input.
COLUMNS = {name: shape for name, shape in SHAPES.items() if shape[1] != 1}
VARIANTS = [(dtype, False) for dtype in FLOATS] + [
    (dtype, True) for dtype in FLOATS if dtype not in HALVES
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", COLUMNS.values(), ids=COLUMNS.keys())
@pytest.mark.parametrize(("dtype", "memory_efficient"), VARIANTS, ids=str)
def test_matches_the_oracle(dtype, memory_efficient, shape, layout, device):
    x, weight, bias = arguments(dtype, device, *shape)
    seed = torch.randn_like(x)
    x, seed = LAYOUTS[layout](x), LAYOUTS[layout](seed)
    norm = lambda *given: FastLayerNormFN.apply(*given, EPS, memory_efficient)
    actual = with_gradients(norm, x, weight, bias, seed)
    reference = lambda *given: with_gradients(oracle, *given)
    # The output's rounding is that of what is recovered from it, and of sums over rows.
    ulps = 4.0 if dtype == torch.float64 or memory_efficient else 1.0
    ulps *= max(1, shape[0]) ** 0.5 if dtype == torch.float64 or memory_efficient else 1
    assert_as_accurate_as(reference, actual, x, weight, bias, seed, ulps=ulps)


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zero_centered(dtype, memory_efficient, device):
    """The bits of a plain norm of 1 + weight, as far as the dtype holds that sum."""
    x, weight, bias = arguments(dtype, device, 9, 33)
    weight = (weight * 8).round() / 8
    weight[weight == -1] = 0
    seed = torch.randn_like(x)
    norm = lambda *t, **options: FastLayerNormFN.apply(*t, EPS, memory_efficient, **options)
    actual = with_gradients(lambda *t: norm(*t, zero_centered_gamma=True), x, weight, bias, seed)
    for a, e in zip(actual, with_gradients(norm, x, 1 + weight, bias, seed), strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_zero_centered_module(dtype, device):
    """A weight counts that 1 + weight would not hold in 16 bits, in one number in ten."""
    small = 2.0 ** (-10 if dtype == torch.bfloat16 else -12)
    module = FastLayerNorm(512, zero_centered_gamma=True).to(device, dtype)
    assert repr(module) == "FastLayerNorm(zero_centered_gamma=True)"
    assert module.weight.eq(0).all()
    assert sorted(module.state_dict()) == ["bias", "weight"]
    x = torch.randn(12, 512, device=device).to(dtype)
    assert torch.equal(module(x), FastLayerNorm(512).to(device, dtype)(x))
    torch.nn.init.constant_(module.weight, small)
    wide = oracle(x.double(), 1, 0, 1e-5)
    with torch.autocast(x.device.type, dtype):
        of_autocast = copy.deepcopy(module).float()(x.float())
    truth = (wide * (1 + small)).to(dtype)
    assert (wide.to(dtype) != truth).double().mean() > 0.1
    for y in (module(x), of_autocast):
        assert (y != truth).double().mean() < 0.01  # near a tie, float32 may round the other way
    module.reset_parameters()
    assert module.weight.eq(0).all()
    del module.__dict__["zero_centered_gamma"]  # as a pickle of Apex's has none
    assert module(x).eq(0).all()


MIXED = [pair for h in HALVES for pair in ((torch.float32, h), (h, torch.float32))]


@pytest.mark.parametrize("dtypes", MIXED, ids=str)
def test_mixed_dtypes(dtypes, device):
    """The output has the weight's dtype, gradients those of what they belong to."""
    own, of_weight = dtypes
    x, weight, bias = arguments(torch.float32, device, 9, 33)
    given = x.to(own), weight.to(of_weight), bias.to(of_weight)
    seed = torch.randn(9, 33, device=device).to(of_weight)
    norm = lambda *given: FastLayerNormFN.apply(*given, EPS)
    actual = with_gradients(norm, *given, seed)
    assert [t.dtype for t in actual] == [of_weight, own, of_weight, of_weight]
    expected = with_gradients(oracle, *(t.double() for t in given), seed.double())
    for a, e in zip(actual, expected, strict=True):
        unit = 4 * torch.finfo(a.dtype).eps
        torch.testing.assert_close(a.double(), e, rtol=unit, atol=4 * unit)


def test_module(device):
    module = FastLayerNorm(16, eps=1e-4, memory_efficient=True).to(device)
    assert module.epsilon == 1e-4
    assert module.memory_efficient
    assert module.weight.eq(1).all()
    assert module.bias.eq(0).all()
    assert sorted(module.state_dict()) == ["bias", "weight"]
    x = torch.randn(3, 2, 16, device=device)
    torch.testing.assert_close(module(x), torch.nn.functional.layer_norm(x, (16,), eps=1e-4))
    with torch.no_grad():
        module.weight.fill_(7)
    module.reset_parameters()
    assert module.weight.eq(1).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast(dtype, device):
    """As Apex's functions: the output in autocast's dtype, gradients in the parameters'."""
    module = FastLayerNorm(16).to(device)
    x = torch.randn(4, 16, device=device, requires_grad=True)
    with torch.autocast(torch.device(device).type, dtype):
        y = module(x)
        plain = FastLayerNormFN.apply(x, module.weight, module.bias, 1e-5)
    assert y.dtype == dtype
    assert plain.dtype == torch.float32
    y.sum().backward()
    assert x.grad.dtype == module.weight.grad.dtype == torch.float32
    torch.testing.assert_close(y.float(), plain, rtol=0.02, atol=0.02)


def test_offsets_do_not_matter(device):
    x, weight, bias = arguments(torch.float32, device, 5, 1000)
    seed = torch.randn_like(x)
    norm = lambda *given: FastLayerNormFN.apply(*given, EPS)
    actual = with_gradients(norm, x + 1e4, weight, bias, seed)
    reference = lambda *given: with_gradients(oracle, *given)
    assert_as_accurate_as(reference, actual, x + 1e4, weight, bias, seed)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4)], ids=str)
def test_no_rows(shape, device):
    _, weight, bias = arguments(torch.float32, device, 1, 4)
    x = torch.ones(shape, device=device)
    y, dx, dweight, dbias = with_gradients(
        lambda *given: FastLayerNormFN.apply(*given, EPS), x, weight, bias, x
    )
    assert y.shape == dx.shape == shape
    assert not dweight.any()
    assert not dbias.any()


def test_same_bits(device):
    given = arguments(torch.float32, device, 3000, 33)
    seed = torch.randn_like(given[0])
    norm = lambda *given: FastLayerNormFN.apply(*given, EPS)
    # Sums over rows are added per thread.
    assert_same_bits(lambda: with_gradients(norm, *given, seed)[:2])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_formula(check, case, device):
    """Compiled code, derivatives, transforms, vmap, export, tracing, autocast."""
    check(CASES[case], device)


def on_ranks(rank, world_size):
    for case in CASES.values():
        check_sharded(case, rank, world_size)


def test_sharded(two_ranks):
    two_ranks(on_ranks)


def test_from_output_refuses_second_derivatives(device):
    x, weight, bias = arguments(torch.float64, device)
    y = FastLayerNormFN.apply(x.requires_grad_(), weight, bias, EPS, True)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="FastLayerNorm"):
        dx.sum().backward()


def test_is_a_good_citizen_of_torch(device):
    x, weight, bias = arguments(torch.float32, device)
    samples = [(x, weight, bias, EPS), (x[:0], weight, bias, 0.0), (x, weight, bias, EPS, True)]
    opcheck_samples(ops.fast_layer_norm_forward, samples)
    y, mean, rstd = ops.fast_layer_norm_forward(x, weight, bias, EPS)
    dy = torch.ones(1, 1, device=device).expand_as(x)
    samples = [(dy, x, weight, mean, rstd, *last) for last in ((False,), (True,), (True, True))]
    opcheck_samples(ops.fast_layer_norm_backward, samples)
    given = (dy, y, weight, bias, rstd, EPS)
    samples = [(*given, *last) for last in ((False,), (True,), (True, True))]
    opcheck_samples(ops.fast_layer_norm_backward_from_output, samples)


OF_APEX = [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.float16)]


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("dtypes", OF_APEX, ids=str)
def test_extension_module_of_apex(dtypes, memory_efficient, device):
    import fast_layer_norm as legacy

    x, gamma, beta = arguments(torch.float32, device)
    x, gamma, beta = x.to(dtypes[0]), gamma.to(dtypes[1]), beta.to(dtypes[1])
    z, mu, rsigma = legacy.ln_fwd(x, gamma, beta, EPS)
    dz = torch.randn_like(z)
    expected = with_gradients(oracle, *(t.double() for t in (x, gamma, beta)), dz.double())
    unit = 0.1 if torch.bfloat16 in dtypes else 2e-2 if memory_efficient else 4e-3
    torch.testing.assert_close(z.double(), expected[0], rtol=unit, atol=unit)
    torch.testing.assert_close(mu.double(), x.double().mean(1), rtol=1e-5, atol=1e-5)
    saved = z if memory_efficient else x
    results = [legacy.ln_bwd(dz, saved, mu, rsigma, gamma, beta, memory_efficient)]
    if not memory_efficient:
        results.append(legacy.ln_bwd(dz, x, mu, rsigma, gamma))
    for dx, dgamma, dbeta, *parts in results:
        assert [p.shape for p in parts] == [(1, 7)] * 2
        for a, e in zip((dx, dgamma, dbeta), expected[1:], strict=True):
            torch.testing.assert_close(a.double(), e, rtol=unit, atol=2 * unit)
    with pytest.raises(TypeError, match="expected 5 or 7 arguments, got 4"):
        legacy.ln_bwd(dz, x, mu, rsigma)


def test_class_of_apex(device):
    given = arguments(torch.float32, device)
    expected = oracle(*given)
    torch.testing.assert_close(_fast_layer_norm(*given, EPS, False), expected)
    torch.testing.assert_close(FastLayerNormFN.forward(None, *given, EPS), expected)
    # Megatron reads the argument's name from the signature of forward.
    assert "memory_efficient" in inspect.getfullargspec(FastLayerNormFN.forward).args


X, W = torch.ones(4, 6), torch.ones(6)
BAD = {
    "integers": (TypeError, "x must be a float64", (X.int(), W, W, EPS)),
    "dtypes": (
        TypeError,
        "bias is torch.float16, but weight is torch.float32",
        (X, W, W.half(), EPS),
    ),
    "columns": (ValueError, r"must have the shape \[6\] of the last", (X, W[:5], W[:5], EPS)),
    "no columns": (ValueError, "which must not be 0", (X[:, :0], W[:0], W[:0], EPS)),
    "dimensions": (ValueError, "must have the shape", (X[0, 0], W, W, EPS)),
    "eps": (ValueError, "epsilon must not be negative, got -1", (X, W, W, -1.0)),
    "devices": (ValueError, "x is on cpu, but weight on meta", (X, W.to("meta"), W, EPS)),
}


@pytest.mark.parametrize(("error", "text", "given"), BAD.values(), ids=BAD.keys())
def test_bad_input(error, text, given):
    with pytest.raises(error, match=f"FastLayerNorm: .*{text}"):
        FastLayerNormFN.apply(*given)


def test_bad_options():
    for options in ((0,), (-3,), (4, -1e-5)):
        with pytest.raises(ValueError, match="hidden_size must be positive and eps not negative"):
            FastLayerNorm(*options)


def test_kernels_check_what_python_did_not():
    for given, text in [
        ((X.t(), W, W), "x must be contiguous"),
        ((X[:, :0], W[:0], W[:0]), "x must be contiguous"),
        ((X, W[:5], W), "weight must be contiguous, with 6 elements"),
        ((X, W, W.double()), "bias must be contiguous, with 6 elements of float32"),
        ((X.long(), W.long(), W.long()), "got int64"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            ops.fast_layer_norm_forward(*given, EPS)
    with pytest.raises(RuntimeError, match="eps must not be negative"):
        ops.fast_layer_norm_forward(X, W, W, -1.0)
    y, mean, rstd = ops.fast_layer_norm_forward(X, W, W, EPS)
    with pytest.raises(RuntimeError, match="rstd must be contiguous, with 4 elements"):
        ops.fast_layer_norm_backward(y, X, W, mean, rstd[:3], True)
    with pytest.raises(RuntimeError, match="dy must be contiguous, with 24 elements"):
        ops.fast_layer_norm_backward_from_output(y[:3], y, W, W, rstd, EPS, True)


def test_import_error_where_kernels_cannot_run(monkeypatch):
    """So that `try: import ...; except ImportError:` of other projects finds its fallback."""
    from apex.contrib._ops import library

    monkeypatch.setattr(library, "manifest", dict)
    monkeypatch.setattr(library, "_loaded", set())
    monkeypatch.setenv("APEX_JIT", "0")
    monkeypatch.delitem(sys.modules, "fast_layer_norm", raising=False)
    with pytest.raises(ImportError, match=r"neither prebuilt .* APEX_JIT=0"):
        importlib.import_module("fast_layer_norm")
