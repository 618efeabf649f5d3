"""What follows matrix products, against PyTorch in float64."""

import pytest
import torch
from torch.nn import functional as F

from apex.contrib.dense_epilogue import (
    GELU,
    RELU,
    SIGMOID,
    decompositions,
    dense_activation_backward,
    dense_gelu,
)
from apex_testkit import FLOATS, LAYOUTS, SHAPES, assert_as_accurate_as, opcheck_samples

ACTIVATIONS = {
    "relu": (RELU, torch.relu),
    "sigmoid": (SIGMOID, torch.sigmoid),
    "gelu": (GELU, lambda x: F.gelu(x, approximate="tanh")),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gelu(dtype, shape, device):
    x = (3 * torch.randn(shape)).to(device, dtype)  # the same numbers on every device
    ulps = 4 if dtype == torch.float64 else 1.0  # exp, quotient and products round as often
    assert_as_accurate_as(ACTIVATIONS["gelu"][1], dense_gelu(x), x, ulps=ulps)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients(dtype, shape, layout, name, device):
    number, activation = ACTIVATIONS[name]
    x = (2 * torch.randn(shape, device=device)).to(dtype)
    dy = layout(torch.randn(shape, device=device, dtype=dtype))
    saved = x if number == GELU else activation(x)

    def oracle(dy, x, saved):
        if number != GELU:  # of the output, which is what the kernel has
            dx = torch.where(saved <= 0, 0, dy) if number == RELU else dy * saved * (1 - saved)
        else:
            x = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(activation(x), x, dy)
        return dx, dx.sum(0)

    actual = dense_activation_backward(dy, saved, number, True)
    # Sums over rows of float64: truth, too, adds one row after the other.
    ulps = max(4.0, shape[0] ** 0.5) if dtype == torch.float64 else 1.0
    assert_as_accurate_as(oracle, actual, dy, x, saved, ulps=ulps)
    dx, nothing = dense_activation_backward(dy, saved, number, False)
    assert torch.equal(dx, actual[0])
    assert nothing.shape == (0,)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_large_values(dtype, device):
    big = 2.0**13
    x = torch.tensor([[-big, big, torch.nan, torch.inf]], device=device, dtype=dtype)
    y = dense_gelu(x)
    assert y[0, :2].tolist() == [0.0, big]
    assert y[0, 2].isnan()
    assert y[0, 3].isinf()
    ones = torch.ones_like(x)
    assert dense_activation_backward(ones, x, GELU, False)[0][0, :2].tolist() == [0.0, 1.0]
    # ReLU's gradient is not multiplied: inf * 0 would be NaN.
    dx, _ = dense_activation_backward(ones * torch.inf, x.clamp(min=0), RELU, False)
    assert dx[0, :2].tolist() == [0.0, torch.inf]
    assert dx[0, 2].isinf()  # a NaN is no number below zero, as for torch


def test_is_a_good_citizen_of_torch(device):
    inputs = [torch.randn(shape, device=device) for shape in ((6,), (0, 6), (2, 3, 6))]
    opcheck_samples(dense_gelu, [(x,) for x in inputs])
    for number in (RELU, SIGMOID, GELU):
        samples = [(torch.ones_like(x), x, number, wanted) for x in inputs for wanted in (0, 1)]
        samples = [(*given[:3], bool(given[3])) for given in samples]
        opcheck_samples(dense_activation_backward, samples)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias_grad", [True, False])
def test_decompositions(bias_grad, dtype, device):
    table = decompositions()
    x, dy = (torch.randn(5, 6, device=device).to(dtype) for _ in range(2))
    unit = 2 * torch.finfo(dtype).eps
    for op, given in (
        (dense_gelu, (x,)),
        *((dense_activation_backward, (dy, x.sigmoid(), n, bias_grad)) for n in (1, 2, 3)),
    ):
        actual, expected = table[op](*given), op(*given)
        torch.testing.assert_close(actual, expected, rtol=unit, atol=4 * unit)


def test_vmap(device):
    x, dy = (torch.randn(4, 3, 5, 6, device=device) for _ in range(2))
    expected = torch.stack([dense_gelu(each.contiguous()) for each in x.unbind(1)])
    assert torch.equal(torch.func.vmap(dense_gelu, in_dims=1)(x), expected)
    saved = x[:, 0].contiguous()
    run = lambda dy: dense_activation_backward(dy, saved, GELU, True)
    expected = [run(each) for each in dy.unbind(1)]
    for actual, *of_samples in zip(torch.func.vmap(run, in_dims=1)(dy), *expected, strict=True):
        assert torch.equal(actual, torch.stack(of_samples))


X = torch.ones(4, 6)


def test_kernels_check_what_python_did_not():
    for op, given, text in [
        (dense_gelu, (X.t(),), "x must be contiguous rows"),
        (dense_gelu, (X[0, 0],), "x must be contiguous rows"),
        (dense_gelu, (X.long(),), "got int64"),
        (dense_activation_backward, (X, X.t(), 1, False), "saved must be contiguous rows"),
        (dense_activation_backward, (X[:3], X, 1, False), "dy must be contiguous, with 24"),
        (dense_activation_backward, (X.half(), X, 1, False), "dy must be contiguous"),
        (dense_activation_backward, (X, X, 0, False), "activation must be 1 .* got 0"),
        (dense_activation_backward, (X, X, 4, True), "activation must be 1 .* got 4"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            op(*given)
