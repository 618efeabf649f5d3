"""Rows with a few columns that are far larger than the others.

Layer normalization takes its pivot from the first ones, which then is far from the row's mean. And
what is added to a large sum is rounded to its last digit: equal terms, all in one direction.
"""

import pytest
import torch

from apex.normalization.fused_layer_norm import (
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
)
from apex_testkit import assert_as_accurate_as

EPS = 1e-5


def formula(x):
    deviation = x - x.mean(-1, keepdim=True)
    return deviation * torch.rsqrt(deviation.square().mean(-1, keepdim=True) + EPS)


def rms_formula(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


@pytest.mark.parametrize("columns", [64, 4096, 65536])
@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("size", [1e2, 1e4, 1e6, 1e8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_output(dtype, size, count, columns, device):
    x = torch.randn(4, columns, device=device)
    x[:, :count] = size * (1 + torch.rand(4, count, device=device))
    x = x.to(dtype)
    y = fused_layer_norm(x, columns, EPS)
    assert_as_accurate_as(formula, y, x)
    # By themselves: their own unit in the last place is far smaller.
    assert_as_accurate_as(lambda x: formula(x)[:, count:], y[:, count:], x)


@pytest.mark.parametrize("columns", [1024, 4096, 65536])
@pytest.mark.parametrize("size", [30.0, 300.0, 3000.0])
@pytest.mark.parametrize(
    ("norm", "formula"), [(fused_layer_norm, formula), (fused_rms_norm, rms_formula)]
)
def test_equal_values_after_a_large_one(norm, formula, size, columns, device):
    values = 0.1 * (1 + 0.37 * torch.arange(64, device=device))
    x = values[:, None].repeat(1, columns)
    x[:, 100] = size
    y = norm(x, columns, EPS)
    assert_as_accurate_as(lambda x: formula(x)[:, :100], y[:, :100], x)


def test_gradients(device):
    x, dy = torch.randn(2, 8, 4096, device=device)
    weight, bias = torch.randn(2, 4096, device=device)
    x[:, :16] = 1e6 * (1 + torch.rand(8, 16, device=device))

    def gradients(norm, x, weight, bias, dy):
        inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]
        return torch.autograd.grad(norm(*inputs), inputs, dy)

    ours = lambda x, w, b: fused_layer_norm_affine(x, w, b, 4096, EPS)
    actual = gradients(ours, x, weight, bias, dy)
    affine = lambda x, w, b: formula(x) * w + b
    assert_as_accurate_as(lambda *args: gradients(affine, *args), actual, x, weight, bias, dy)
