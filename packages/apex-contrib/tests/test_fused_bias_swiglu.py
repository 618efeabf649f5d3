"""SwiGLU against float64 PyTorch, over dtypes, shapes and layouts, and what torch asks of it."""

import importlib
import sys

import pytest
import torch
from torch.nn import functional as F

from apex.contrib.fused_bias_swiglu import (
    decompositions,
    fused_bias_swiglu,
    fused_bias_swiglu_backward,
    fused_bias_swiglu_forward,
)
from apex_testkit import FLOATS, LAYOUTS, SHAPES, assert_as_accurate_as, opcheck_samples
from apex_testkit.formulas import CHECKS, Case, check_sharded


def oracle(input, bias=None):
    a, b = (input if bias is None else input + bias).chunk(2, -1)
    return F.silu(a) * b


def arguments(dtype, device, columns=9):
    sizes = (4, 2 * columns), (2 * columns,)
    input, bias = (torch.randn(s, device=device, dtype=dtype) for s in sizes)
    return input, bias


def case(arguments, grads):
    return Case(
        fused_bias_swiglu,
        arguments,
        oracle,
        grads=grads,
        rows=(0,),
        operators=(fused_bias_swiglu_forward, fused_bias_swiglu_backward),
        decompositions=decompositions,
        ulps=3,  # truth rounds as often as we do: exp, quotient and products
        wide=arguments,
    )


CASES = {
    "bias": case(arguments, (0, 1)),
    "no bias": case(lambda *given: arguments(*given)[:1], (0,)),
}


def with_gradients(function, *given):
    *inputs, dy = given
    inputs = [t.detach().requires_grad_() for t in inputs]
    y = function(*inputs)
    return y.detach(), *torch.autograd.grad(y, inputs, dy)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype, shape, layout, has_bias, device):
    wide = (*shape[:-1], 2 * shape[-1])
    input, dy = (layout(torch.randn(s, device=device, dtype=dtype)) for s in (wide, shape))
    inputs = [input, torch.randn(wide[-1], device=device, dtype=dtype)][: 1 + has_bias]
    if wide[-1] == 0:
        with pytest.raises(ValueError, match="input must have shape"):
            fused_bias_swiglu(*inputs)
        return
    actual = with_gradients(fused_bias_swiglu, *inputs, dy)
    rows = max(1, input.numel() // wide[-1])
    # Sums over rows of float64: truth, too, adds one row after the other.
    ulps = max(3.0, rows**0.5) if dtype == torch.float64 else 1.0
    reference = lambda *given: with_gradients(oracle, *given)
    assert_as_accurate_as(reference, actual, *inputs, dy, ulps=ulps)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_formula(case, check, device):
    """Compiled code, derivatives, transforms, vmap, export, tracing, autocast."""
    check(case, device)


def on_ranks(rank, world_size):
    for case in CASES.values():
        check_sharded(case, rank, world_size)


def test_sharded(two_ranks):
    two_ranks(on_ranks)


@pytest.mark.parametrize("has_bias", [False, True])
def test_is_a_good_citizen_of_torch(has_bias, device):
    bias = torch.randn(6, device=device) if has_bias else None
    inputs = [torch.randn(shape, device=device) for shape in ((6,), (0, 6), (2, 3, 6))]
    opcheck_samples(fused_bias_swiglu_forward, [(x, bias) for x in inputs])
    samples = [(x[..., :3], x, bias, wanted) for x in inputs for wanted in {False, has_bias}]
    opcheck_samples(fused_bias_swiglu_backward, samples)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_large_values(dtype, device):
    """Where exp overflows, SiLU is 0 or the identity; inf and NaN stay in their column."""
    big = 2.0**13
    input = torch.tensor([[-big, big, torch.nan, torch.inf, 2.0, 3.0, 1.0, 1.0]], device=device)
    y = fused_bias_swiglu(input.to(dtype))
    assert y[0, :2].tolist() == [0.0, 3 * big]
    assert y[0, 2].isnan()
    assert y[0, 3].isinf()


def test_autocast(device):
    input, bias = arguments(torch.float32, device)
    with torch.autocast(device.type, torch.bfloat16):
        y = fused_bias_swiglu(input, bias)
    assert torch.equal(y, fused_bias_swiglu(input.bfloat16(), bias.bfloat16()))


X = torch.ones(4, 6)
BAD = {
    "integers": (TypeError, "input must be a float64", (X.int(), None)),
    "odd": (ValueError, r"input must have shape \[\.\.\., 2H\]", (X[:, :5], None)),
    "scalar": (ValueError, "input must have shape", (X[0, 0], None)),
    "bias's dtype": (TypeError, "bias is torch.float16, but input is", (X, X[0].half())),
    "bias's shape": (ValueError, r"bias must have shape \[6\] on cpu", (X, X[0, :3])),
    "bias's device": (ValueError, "bias must .* on meta", (X, X[0].to("meta"))),
    "no tensor": (TypeError, "bias must be a float64.* got float", (X, 0.5)),
}


@pytest.mark.parametrize(("error", "text", "given"), BAD.values(), ids=BAD.keys())
def test_bad_input(error, text, given):
    with pytest.raises(error, match=f"fused_bias_swiglu: {text}"):
        fused_bias_swiglu(*given)


def test_kernels_check_what_python_did_not():
    for given, text in [
        ((X.t(), None), "input must be contiguous rows"),
        ((X[:, :5].contiguous(), None), "even number of columns"),
        ((X, X[0, :5]), "bias must be"),
        ((X.long(), None), "got int64"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            fused_bias_swiglu_forward(*given)
    for given, text in [
        ((X, X, None, False), "dy must be contiguous, with 12 elements"),
        ((X[:, :3], X, None, True), "bias_grad needs a bias"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            fused_bias_swiglu_backward(*given)


def test_names_of_apex(device):
    import fused_bias_swiglu as legacy

    from apex.fused_bias_swiglu import fused_bias_swiglu as function

    assert function is fused_bias_swiglu
    input, bias = (t.requires_grad_() for t in arguments(torch.float32, device))
    y = function(input, bias)
    dy = torch.randn_like(y)
    dinput, dbias = torch.autograd.grad(y, (input, bias), dy)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(legacy.forward(input, bias), y)
    actual = legacy.backward(dy, input, bias)
    assert torch.equal(actual, dinput)
    assert not actual.requires_grad
    torch.testing.assert_close(actual.sum(0), dbias)
    with pytest.raises(TypeError, match="bias is torch"):
        legacy.backward(dy, input, bias.half())


def test_import_error_where_kernels_cannot_run(monkeypatch):
    """So that `try: import ...; except ImportError:` of other projects finds its fallback."""
    from apex.contrib._ops import library

    monkeypatch.setattr(library, "manifest", dict)
    monkeypatch.setattr(library, "_loaded", set())
    monkeypatch.setenv("APEX_JIT", "0")
    monkeypatch.delitem(sys.modules, "fused_bias_swiglu", raising=False)
    with pytest.raises(ImportError, match=r"neither prebuilt .* APEX_JIT=0"):
        importlib.import_module("fused_bias_swiglu")
