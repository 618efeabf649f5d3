"""LayerNormSmallShapeOptImpl against float64 PyTorch; its kernels are those of FastLayerNorm."""

import inspect

import pytest
import torch
from torch.nn import functional as F

from apex.contrib.openfold_triton import LayerNormSmallShapeOptImpl
from apex_testkit import FLOATS, HALVES, LAYOUTS, assert_as_accurate_as

EPS = 1e-3
# inputs, and how many of their last dimensions are normalized
SHAPES = {
    "openfold": ((1, 5, 6, 128), 1),
    "odd": ((7, 33), 1),
    "two": ((3, 4, 5, 6), 2),
    "all": ((4, 9), 2),
    "row": ((9,), 1),
    "empty": ((0, 3, 5), 1),
    "tall": ((65_537, 7), 1),
}
norm = LayerNormSmallShapeOptImpl.apply


def oracle(x, weight, bias, eps=EPS):
    dims = tuple(range(-weight.dim(), 0))
    deviation = x - x.mean(dims, keepdim=True)
    variance = deviation.square().mean(dims, keepdim=True)
    return deviation * torch.rsqrt(variance + eps) * weight + bias


def ours(x, weight, bias):
    return norm(x, weight.shape, weight, bias, EPS)


def with_gradients(function, dy, *given):
    leaves = [t.detach().requires_grad_() for t in given]
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "dims"), SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype, shape, dims, layout, device):
    x, dy = (torch.randn(shape, device=device).to(dtype) for _ in "xy")
    weight, bias = torch.randn(2, *shape[-dims:], device=device).to(dtype)
    x, dy = LAYOUTS[layout](x), LAYOUTS[layout](dy)
    actual = with_gradients(ours, dy, x, weight, bias)
    # float64 rounds as often as truth, once a row in the sums of weights.
    ulps = 4.0 * max(1, shape[0]) ** 0.5 if dtype == torch.float64 else 1.0
    reference = lambda dy, *given: with_gradients(oracle, dy, *given)
    assert_as_accurate_as(reference, actual, dy, x, weight, bias, ulps=ulps)
    assert actual[0].is_contiguous()


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_the_result_has_the_dtype_of_the_inputs(half, device):
    """Whatever weight and bias have; gradients have those of what they belong to."""
    for own, of_weight in ((half, torch.float32), (torch.float32, half)):
        x = torch.randn(9, 33, device=device).to(own)
        weight, bias = torch.randn(2, 33, device=device).to(of_weight)
        dy = torch.randn_like(x)
        actual = with_gradients(ours, dy, x, weight, bias)
        assert [t.dtype for t in actual] == [own, own, of_weight, of_weight]
        expected = with_gradients(oracle, dy.double(), x.double(), weight.double(), bias.double())
        for a, e in zip(actual, expected, strict=True):
            unit = 4 * torch.finfo(a.dtype).eps
            torch.testing.assert_close(a.double(), e, rtol=unit, atol=4 * unit)


def test_defaults_and_names_of_apex(device):
    x = torch.randn(3, 2, 16, device=device)
    weight, bias = torch.randn(2, 16, device=device)
    expected = F.layer_norm(x, (16,), weight, bias)  # its eps is 1e-5, too
    torch.testing.assert_close(norm(x, (16,), weight, bias), expected)
    torch.testing.assert_close(norm(x, 16, weight, bias), expected)
    torch.testing.assert_close(
        LayerNormSmallShapeOptImpl.forward(None, x, [16], weight, bias), expected
    )
    names = ["inputs", "normalized_shape", "weight", "bias", "eps"]
    assert inspect.getfullargspec(LayerNormSmallShapeOptImpl.forward).args == ["ctx", *names]


def test_compiled_twice_differentiated_and_transformed(device):
    x = torch.randn(2, 3, 4, 5, device=device, dtype=torch.float64).transpose(1, 2)
    weight, bias = torch.randn(2, 5, device=device, dtype=torch.float64)
    given = [t.requires_grad_() for t in (x.detach(), weight, bias)]
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    dy = torch.randn_like(x)
    torch.testing.assert_close(
        with_gradients(compiled, dy, *given), with_gradients(oracle, dy, *given)
    )
    assert torch.autograd.gradcheck(ours, given)
    assert torch.autograd.gradgradcheck(ours, given)
    summed = lambda function: lambda *given: function(*given).sin().sum()
    actual, expected = (
        torch.func.grad(summed(function), (0, 1, 2))(*given) for function in (ours, oracle)
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast(dtype, device):
    x = torch.randn(4, 16, device=device, requires_grad=True)
    weight, bias = torch.ones(16, device=device), torch.zeros(16, device=device)
    with torch.autocast(device.type, dtype):
        y = ours(x, weight, bias)
    assert y.dtype == dtype
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(y.float(), oracle(x, weight, bias), rtol=0.02, atol=0.02)


X, W = torch.ones(4, 6), torch.ones(6)
BAD = {
    "integers": (TypeError, "inputs must be a float64", (X.int(), (6,), W, W)),
    "no bias": (TypeError, "bias must be a float64.* got NoneType", (X, (6,), W, None)),
    "shape": (ValueError, r"normalized_shape must be .* got \[5\]", (X, (5,), W[:5], W[:5])),
    "weight": (ValueError, r"weight \[5\] and bias \[6\]", (X, (6,), W[:5], W)),
    "no columns": (ValueError, "of inputs, not 0", (X[:, :0], (0,), W[:0], W[:0])),
    "no shape": (ValueError, r"got \[\]", (X, (), W[0], W[0])),
    "more": (ValueError, r"got \[1, 4, 6\]", (X, (1, 4, 6), X[None], X[None])),
    "eps": (ValueError, "eps must not be negative, got -1", (X, (6,), W, W, -1.0)),
    "devices": (ValueError, "inputs are on cpu, but weight on meta", (X, 6, W.to("meta"), W)),
}


@pytest.mark.parametrize(("error", "text", "given"), BAD.values(), ids=BAD.keys())
def test_bad_input(error, text, given):
    with pytest.raises(error, match=f"LayerNormSmallShapeOptImpl: .*{text}"):
        norm(*given)
